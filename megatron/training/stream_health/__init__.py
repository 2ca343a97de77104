"""How the residual streams of a wide model are doing while it trains (docs/monitor.md).

branches (what is looked at), samples (sums over activations), gradients (of controllers), report (the numbers, from the
sums of all ranks), pictures (heat maps), monitor (when, and where it goes).

What always holds: parameters, activations, gradients and random numbers are only read: losses are bit-equal with and
without it.

Shape suffixes: s sequence, b batch, n tokens, k and j streams, d branch width D, w stream width K*D, r branches of
the whole model.
"""
