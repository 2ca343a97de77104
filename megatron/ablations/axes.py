"""What an axis of an ablation does to the flags of its base recipe.

    flags_of("streams", 4, base_flags)          # {"wide-residual": 4}
    flags_of("width", 256, base_flags)          # {"hidden-size": 256, "ffn-hidden-size": 768, ...}

| axis | values | flags |
|---|---|---|
| streams | whole numbers from 1 | wide-residual; 1 is the ordinary model |
| retention | true, false | wide-residual-learned-retention |
| init-scale | numbers from 0 | wide-residual-streamwise-sigmoid-init-scale |
| replay | false, true, whole numbers from 1, auto | recompute-modules residual_stream, and layers in a block |
| depth | whole numbers from 1 | num-layers |
| width | whole numbers from 1 | hidden-size; heads and MLP widths in the recipe's proportion |
| learning-rate | numbers above 0 | lr; min-lr in the recipe's proportion |
| any flag of the training scripts | what a recipe takes | that flag alone |

What always holds: a value False takes a flag away, as in a recipe; a value that cannot be used is a LaunchError that
names the axis, the value and what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.run_control.errors import LaunchError
from megatron.run_control.recipes import FlagValue

type Flags = Mapping[str, FlagValue]

# Axes that mean something for wide streams only: a variant without streams cannot have them.
WIDE_AXES = ("retention", "init-scale", "replay")
# Flags that need --wide-residual; replay is judged by its module.
WIDE_FLAGS = (
    "wide-residual-learned-retention",
    "wide-residual-retention-init",
    "wide-residual-retention-max-forget",
    "wide-residual-streamwise-sigmoid-init-scale",
    "residual-stream-recompute-num-layers",
)
REPLAY_MODULE = "residual_stream"
# Widths that grow with --width.
_SCALED_WIDTHS = (
    "ffn-hidden-size",
    "num-attention-heads",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
)


def is_whole(value: object, least: int) -> bool:
    """Whether a value is an int (no bool) from `least`, of at most 18 digits."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 10**18


def as_number(value: object) -> float | None:
    """A number, also in YAML's text form of 1e-3 (which has no point); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _wrong(axis: str, value: object, wanted: str) -> LaunchError:
    return LaunchError(f"axes: {axis} is {value!r}, {wanted} is wanted")


def _streams(value: object, base: Flags) -> dict[str, FlagValue]:
    if not is_whole(value, 1):
        raise _wrong("streams", value, "a whole number from 1 (1 is the ordinary model)")
    return {"wide-residual": False if value == 1 else value}  # type: ignore[dict-item]


def _retention(value: object, base: Flags) -> dict[str, FlagValue]:
    if not isinstance(value, bool):
        raise _wrong("retention", value, "true or false")
    return {"wide-residual-learned-retention": value}


def _init_scale(value: object, base: Flags) -> dict[str, FlagValue]:
    number = as_number(value)
    if number is None or number < 0:
        raise _wrong("init-scale", value, "a number from 0")
    return {"wide-residual-streamwise-sigmoid-init-scale": value}  # type: ignore[dict-item]


def _replay(value: object, base: Flags) -> dict[str, FlagValue]:
    if not (isinstance(value, bool) or value == "auto" or is_whole(value, 1)):
        raise _wrong("replay", value, "false, true, auto or a whole number of layers in a block")
    given = base.get("recompute-modules", [])
    modules = [module for module in (given if isinstance(given, list) else [given]) if module != REPLAY_MODULE]
    granularity = base.get("recompute-granularity", "selective")
    if granularity != "selective":
        raise LaunchError(f"axes: replay needs recompute-granularity selective, the recipe has {granularity!r}")
    if value is False:
        kept: FlagValue = modules or False
        return {
            "recompute-granularity": granularity if modules else False,
            "recompute-modules": kept,
            "residual-stream-recompute-num-layers": False,
        }
    return {
        "recompute-granularity": "selective",
        "recompute-modules": [*modules, REPLAY_MODULE],
        "residual-stream-recompute-num-layers": False if value is True else value,  # type: ignore[dict-item]
    }


def _depth(value: object, base: Flags) -> dict[str, FlagValue]:
    if not is_whole(value, 1):
        raise _wrong("depth", value, "a whole number of layers from 1")
    if "hybrid-layer-pattern" in base:
        raise LaunchError("axes: depth: the recipe is a hybrid, its pattern says the depth: use hybrid-layer-pattern")
    return {"num-layers": value}  # type: ignore[dict-item]


def _width(value: object, base: Flags) -> dict[str, FlagValue]:
    if not is_whole(value, 1):
        raise _wrong("width", value, "a whole number from 1")
    old = as_number(base.get("hidden-size"))
    if old is None or old < 1:
        raise LaunchError("axes: width: the recipe has no hidden-size to scale from")
    flags: dict[str, FlagValue] = {"hidden-size": value}  # type: ignore[dict-item]
    for name in _SCALED_WIDTHS:
        if name not in base:
            continue
        number = as_number(base[name])
        if number is None or (number * int(value)) % old:  # type: ignore[call-overload]
            raise LaunchError(
                f"axes: width {value}: {name} is {base[name]!r} at hidden-size {old:.0f}, which gives no whole number"
            )
        flags[name] = int(number * int(value) / old)  # type: ignore[call-overload]
    return flags


def _learning_rate(value: object, base: Flags) -> dict[str, FlagValue]:
    number = as_number(value)
    if number is None or number <= 0:
        raise _wrong("learning-rate", value, "a number above 0")
    flags: dict[str, FlagValue] = {"lr": value}  # type: ignore[dict-item]
    if "min-lr" in base:
        least, peak = as_number(base["min-lr"]), as_number(base.get("lr"))
        if least is None or peak is None or peak <= 0:
            raise LaunchError("axes: learning-rate: the recipe's min-lr has no lr to stand in proportion to")
        flags["min-lr"] = float(f"{number * least / peak:.6g}")
    return flags


_AXES: Mapping[str, Callable[[object, Flags], dict[str, FlagValue]]] = {
    "streams": _streams,
    "retention": _retention,
    "init-scale": _init_scale,
    "replay": _replay,
    "depth": _depth,
    "width": _width,
    "learning-rate": _learning_rate,
}
NAMED_AXES = tuple(_AXES)


def flags_of(axis: str, value: object, base: Flags) -> dict[str, FlagValue]:
    """The flags that one value of an axis sets on top of the base's flags. Raises LaunchError for a wrong value."""
    if axis in _AXES:
        return _AXES[axis](value, base)
    return {axis: value}  # type: ignore[dict-item]


def label_of(axis: str, value: object) -> str:
    """What a value adds to a variant's name; empty for what is simply absent."""
    if axis == "streams":
        return "ordinary" if value == 1 else f"streams-{value}"
    if value is True:
        return axis
    if value is False:
        return "" if axis in WIDE_AXES else f"no-{axis}"
    text = "_".join(map(str, value)) if isinstance(value, list) else str(value)
    short = {"learning-rate": "lr"}.get(axis, axis)
    return f"{short}-" + "".join(letter if letter.isalnum() or letter in ".+-*_" else "_" for letter in text)


def check_streams(flags: Flags, settings: Mapping[str, object]) -> None:
    """Raise LaunchError where flags for wide streams meet the ordinary model, naming the axis that brought them."""
    if "wide-residual" in flags:
        return
    modules = flags.get("recompute-modules", [])
    alone = [name for name in WIDE_FLAGS if name in flags]
    if REPLAY_MODULE in (modules if isinstance(modules, list) else [modules]):
        alone.append(f"recompute-modules {REPLAY_MODULE}")
    if not alone:
        return
    guilty = [axis for axis in WIDE_AXES if settings.get(axis, False) is not False]
    source = f"axes: {' and '.join(guilty)}" if guilty else f"flags: {alone[0]}"
    raise LaunchError(
        f"{source} contradicts streams: {settings.get('streams', 1)}, for the ordinary model has no streams. Write "
        "axes as a list of two mappings, one with streams: 1 alone and one with the wide variants"
    )
