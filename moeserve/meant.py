"""What users and other engines call the values of our settings, for the end of an error.

Pure. Knows words: of a setting, which others stand for one of its values, and what is to be known
of that. Knows nothing of which settings there are, or of what is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ep.nearest import nearest, nearest_hint

# What a row of the model's dtype may be called, where `model` is meant
_MODEL_DTYPES = ("bf16", "bfloat16", "half", "fp16", "float16", "fp32", "float32")
_FP8 = ("e4m3", "float8")  # beside what begins with fp8
_YES = ("on", "true", "yes", "always", "1")
_NO = ("off", "false", "no", "none", "never", "0")

# Value, and what is said of it behind its name, by word, by setting
_WORDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "engine.device": dict.fromkeys(("gpu", "gpus", "nvidia"), ("cuda", "")),
    "engine.graphs": {
        **dict.fromkeys((*_YES, "cuda"), ("auto", "on GPUs, where steps can be captured")),
        **dict.fromkeys(_NO, ("off", "")),
    },
    "engine.ahead": {
        **dict.fromkeys(_YES, ("on", "")),
        **dict.fromkeys(_NO, ("off", "")),
    },
    "model.dtype": {
        **dict.fromkeys(("bf16",), ("bfloat16", "")),
        **dict.fromkeys(("half", "fp16", "float16"), ("bfloat16", "float16 is not computed in")),
        **dict.fromkeys(("fp32", "float", "full"), ("float32", "")),
        **dict.fromkeys(_FP8, ("auto", "FP8 weights: see weights")),
    },
    "model.kernels": {
        **dict.fromkeys(("gpu", "cuda"), ("triton", "")),
        **dict.fromkeys(("cpu", "c", "cpp", "c++"), ("native", "")),
        **dict.fromkeys(("eager", "reference", "pytorch"), ("torch", "")),
        **dict.fromkeys(
            ("deepgemm", "deep_gemm", "flashmla", "flash_mla", "flashinfer"),
            ("triton", "a library beside it: by kernel_table"),
        ),
    },
    "model.weights": {
        **dict.fromkeys(_FP8, ("fp8", "")),
        **dict.fromkeys((*_MODEL_DTYPES, "model"), ("dequantised", "")),
    },
    "parallel.shared_expert": {
        **dict.fromkeys(("slot", "slots", "routed"), ("hosted", "")),
        **dict.fromkeys(("local", "each", "copied"), ("replicated", "")),
    },
    "parallel.wire": {
        **dict.fromkeys(_MODEL_DTYPES, ("model", "rows as the model computes")),
        **dict.fromkeys(_FP8, ("fp8", "what its scales are, the checkpoint decides")),
    },
    "cache.kv_cache_dtype": {
        **dict.fromkeys((*_MODEL_DTYPES, "auto"), ("model", "the model's own dtype")),
        **dict.fromkeys(_FP8, ("fp8", "e4m3, a scale for each 128 channels")),
    },
    "rebalance.group_policy": {
        **dict.fromkeys(("global", "none"), ("free", "")),
        **dict.fromkeys(("group", "hierarchical"), ("node", "")),
    },
    "speculate.rule": {
        **dict.fromkeys(("greedy", "exact", "strict", "lossless"), ("same", "")),
        **dict.fromkeys(("leviathan", "sampling"), ("rejection", "")),
    },
    "speculate.method": {
        **dict.fromkeys(_NO, ("off", "")),
        **dict.fromkeys(_YES, ("auto", "")),
        **dict.fromkeys(("nextn", "deepseek_mtp"), ("mtp", "")),
        **dict.fromkeys(("lookup", "prompt_lookup"), ("ngram", "")),
    },
    "server.log_level": {
        **dict.fromkeys(("critical", "fatal"), ("error", "")),
        **dict.fromkeys(("trace", "verbose"), ("debug", "")),
    },
}


def hint(setting: str, given: str, valid: Iterable[str]) -> str:
    """`; nearest: NAME (what it is)` for the end of an error: what the word is known to mean there,
    else the most similar name. Nothing where there is none."""
    names = list(valid)
    word = given.strip().casefold()
    known = _WORDS.get(setting, {})
    if word.startswith("fp8") and "e4m3" in known:
        word = "e4m3"
    if setting == "engine.device" and word.startswith(("cuda:", "gpu:")):
        return _say("cuda", "each rank takes one of its own")
    # A word that is typed wrongly means what the right one would.
    close = word if word in known else nearest(word, [*names, *known])
    if close is not None and close not in names and known[close][0] in names:
        return _say(*known[close])
    return nearest_hint(given, names)


def _say(name: str, note: str) -> str:
    return f"; nearest: {name}{f' ({note})' if note else ''}"
