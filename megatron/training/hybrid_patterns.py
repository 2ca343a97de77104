"""Layer patterns of hybrid models, checked so that a mistake is shown where it stands.

    check_hybrid_pattern("M*-X", flag="--hybrid-layer-pattern", served=local_layer_symbols)
    ValueError: 'X' at position 4 of --hybrid-layer-pattern is no layer symbol; ...
        M*-X
           ^

A pattern is one symbol per layer, `|` between pipeline segments, and one `/` before each of its multi-token prediction
depths: "M*-E|M*-E/M*". What always holds: a pattern that passes is one that upstream's parser takes, and means the same
there; nothing is repaired.
"""

from __future__ import annotations

import importlib.util
from itertools import accumulate

PIPE, DEPTH = "|", "/"

LAYER_SYMBOLS = {
    "M": "Mamba-2",
    "*": "attention",
    "-": "MLP",
    "E": "MoE",
    "G": "gated delta net",
    "+": "multi-latent attention",
    "D": "DeepSeek sparse attention",
}

# Symbols that need a package: symbol -> (module, the package's name).
_NEEDS = {
    "G": (("transformer_engine", "transformer-engine"), ("fla", "flash-linear-attention")),
    "+": (("transformer_engine", "transformer-engine"),),
    "D": (("transformer_engine", "transformer-engine"),),
}


def pointed_error(message: str, pattern: str, position: int) -> ValueError:
    """Return the error with that message and, under it, the pattern with a mark at the zero-based position."""
    return ValueError(f"{message}\n    {pattern}\n    {' ' * position}^")


def known_symbols() -> str:
    """What a pattern may hold, for messages."""
    layers = ", ".join(f"{symbol} {meaning}" for symbol, meaning in LAYER_SYMBOLS.items())
    return f"{layers}; {PIPE} cuts pipeline segments, {DEPTH} begins a multi-token prediction depth"


def _missing(symbol: str, transformer_engine: bool) -> list[str]:
    """The packages that a layer of this symbol needs and that are not here."""
    missing = []
    for module, package in _NEEDS.get(symbol, ()):
        here = transformer_engine if module == "transformer_engine" else importlib.util.find_spec(module) is not None
        if not here:
            missing.append(package)
    return missing


def check_hybrid_pattern(pattern: str, flag: str, *, transformer_engine: bool) -> None:
    """Raise ValueError, pointing at the position, for a pattern that no hybrid model can be built from here.

    Args:
        pattern: what the user gave.
        flag: the option by which it was given, for the message.
        transformer_engine: whether the layers are built from Transformer Engine's modules.
    """
    if not pattern.split(DEPTH)[0].replace(PIPE, ""):
        raise pointed_error(f"{flag} has no layer before position 1; {known_symbols()}", pattern, 0)
    depths_begun = 0
    for i, symbol in enumerate(pattern):
        where = f"'{symbol}' at position {i + 1} of {flag}"
        if symbol == DEPTH:
            depths_begun += 1
            if pattern[i + 1 : i + 2] in ("", DEPTH):
                raise pointed_error(f"{where} begins a prediction depth without a layer", pattern, i)
        elif symbol == PIPE:
            if depths_begun:
                raise pointed_error(f"{where} cuts a prediction depth, which stays on one pipeline stage", pattern, i)
        elif symbol not in LAYER_SYMBOLS:
            raise pointed_error(f"{where} is no layer symbol; wanted: {known_symbols()}", pattern, i)
        elif missing := _missing(symbol, transformer_engine):
            raise pointed_error(f"{where} ({LAYER_SYMBOLS[symbol]}) needs {' and '.join(missing)}", pattern, i)
    _check_attention_kinds(pattern, flag)
    _check_depths(pattern, flag)


def _check_attention_kinds(pattern: str, flag: str) -> None:
    """Attention and multi-latent attention do not go together: one option of the config chooses between them."""
    latent = min((pattern.find(symbol) for symbol in "+D" if symbol in pattern), default=-1)
    if latent >= 0 and "*" in pattern:
        plain = pattern.find("*")
        later = max(latent, plain)
        raise pointed_error(
            f"'{pattern[later]}' at position {later + 1} of {flag}: a model has either attention (*) or multi-latent "
            f"attention (+, D), and '{pattern[min(latent, plain)]}' stands before",
            pattern,
            later,
        )


def _check_depths(pattern: str, flag: str) -> None:
    """All prediction depths have the same layers."""
    main, *depths = pattern.split(DEPTH)
    position = len(main) + 1
    for number, depth in enumerate(depths, start=1):
        if depth != depths[0]:
            raise pointed_error(
                f"prediction depth {number} of {flag} is '{depth}', at position {position + 1}; all depths have the "
                f"same layers, those of the first are '{depths[0]}'",
                pattern,
                position,
            )
        position += len(depth) + 1


def check_layer_count(pattern: str, flag: str, num_layers: int) -> None:
    """Raise ValueError, pointing at the position, when --num-layers says something else than the pattern."""
    main = pattern.split(DEPTH)[0]
    positions = [i for i, symbol in enumerate(main) if symbol != PIPE]
    if len(positions) == num_layers:
        return
    too_many = len(positions) > num_layers
    position = positions[num_layers] if too_many and num_layers >= 0 else len(main)
    what = f"layer {num_layers + 1} is at position {position + 1}" if too_many else f"it ends after {len(positions)}"
    raise pointed_error(
        f"--num-layers is {num_layers}, {flag} has {len(positions)} layers ({what}); leave --num-layers out, the "
        "pattern says it",
        pattern,
        position,
    )


def pipeline_segments(
    pattern: str, stages: int, first: int | None = None, last: int | None = None
) -> list[tuple[int, str]]:
    """Return (start in the pattern, layers) of the segments that a pipeline holds: segment i is on stage i % stages.

    Args:
        first: --decoder-first-pipeline-num-layers, for a pattern without cuts.
        last: --decoder-last-pipeline-num-layers.
    """
    main = pattern.split(DEPTH)[0]
    if PIPE in main or stages == 1:
        parts = main.split(PIPE)
        return list(zip(accumulate((len(part) + 1 for part in parts), initial=0), parts, strict=False))
    inner = stages - sum(size is not None for size in (first, last))
    sizes = [(len(main) - (first or 0) - (last or 0)) // inner] * inner if inner else []
    sizes = [*([] if first is None else [first]), *sizes, *([] if last is None else [last])]
    starts = list(accumulate(sizes, initial=0))
    return [(start, main[start : start + size]) for start, size in zip(starts, sizes, strict=False)]


def check_uneven_stages(pattern: str, flag: str, pipeline_size: int, first: int | None, last: int | None) -> None:
    """Raise ValueError when the layers of the first or last stage leave some that no other stage takes.

    Args:
        first: --decoder-first-pipeline-num-layers.
        last: --decoder-last-pipeline-num-layers.
    """
    main = pattern.split(DEPTH)[0].replace(PIPE, "")
    fixed = [layers for layers in (first, last) if layers is not None]
    stages, rest = pipeline_size - len(fixed), len(main) - sum(fixed)
    if min(fixed, default=0) < 0 or rest < 0 or (rest % stages if stages else rest):
        given = " and ".join(
            f"--decoder-{place}-pipeline-num-layers {layers}"
            for place, layers in (("first", first), ("last", last))
            if layers is not None
        )
        raise ValueError(
            f"{given} of the {len(main)} layers of {flag} leave {rest} for {stages} other pipeline stages; cut the "
            f"pattern with '{PIPE}' into {pipeline_size} segments instead"
        )


def check_pipeline_segments(pattern: str, flag: str, pipeline_size: int) -> None:
    """Raise ValueError, pointing at the position, when the pattern cannot be laid over the pipeline stages."""
    main = pattern.split(DEPTH)[0]
    segments = main.split(PIPE)
    if pipeline_size == 1:
        if PIPE in main:
            raise pointed_error(
                f"'{PIPE}' at position {main.find(PIPE) + 1} of {flag} cuts pipeline segments, and "
                f"--pipeline-model-parallel-size is 1; leave out each '{PIPE}', the layers stay the same, or give the "
                "number of stages",
                pattern,
                main.find(PIPE),
            )
    elif len(segments) == 1:
        if len(main) % pipeline_size:
            raise pointed_error(
                f"the {len(main)} layers of {flag} do not divide among {pipeline_size} pipeline stages; cut it with "
                f"'{PIPE}' into {pipeline_size} segments",
                pattern,
                len(main) // pipeline_size * pipeline_size,
            )
    elif len(segments) % pipeline_size:
        whole = len(segments) // pipeline_size * pipeline_size
        raise pointed_error(
            f"{flag} has {len(segments)} segments, which do not divide among {pipeline_size} pipeline stages; cut it "
            f"into {pipeline_size} or a multiple",
            pattern,
            len(PIPE.join(segments[:whole])) if whole else len(main),
        )
    else:
        _check_inner_segments(pattern, flag, segments)


def _check_inner_segments(pattern: str, flag: str, segments: list[str]) -> None:
    """A segment between the first and the last has a layer.

    Without one a stage sends on the very tensor that it received. With megatron-core 0.19.2 such runs went wrong at the
    second step, ordinary and wide: gradient norms of 25,000 and infinity.
    """
    for index in range(1, len(segments) - 1):
        if not segments[index]:
            position = len(PIPE.join(segments[:index]))
            raise pointed_error(
                f"segment {index + 1} of {flag}, at position {position + 1}, has no layer; only the first (with the "
                "embedding) and the last (with the output layer) may be empty",
                pattern,
                position,
            )
