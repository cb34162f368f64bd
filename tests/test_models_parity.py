"""Model math: transformers, the reference model and the serving path say the same, in fp32."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch.local import LocalDispatcher
from dispatch.route import count_picks
from ep.group import EPGroup
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.mla import naive_from
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config, yarn
from models.deepseek.reference import ReferenceModel, ReferenceOutput
from models.offline import OfflineRunner

TOLERANCE = 1e-4
SINGLE = EPGroup.single()


@dataclass(frozen=True)
class Case:
    family: str
    overrides: dict[str, Any]
    bias_shift: float = 0.0


CASES = {
    "v3": Case("v3", {}),
    "v3-one-group": Case("v3", {"n_group": 1, "topk_group": 1}),
    "v3-eight-groups": Case("v3", {"n_group": 8, "topk_group": 4}),
    "v3-all-scores-negative": Case("v3", {}, bias_shift=-2.0),
    "v3-no-yarn": Case("v3", {"rope_scaling": None}),
    "v3-no-q-lora": Case("v3", {"q_lora_rank": None}),
    "v3-half-split-rope": Case("v3", {"rope_interleave": False}),
    "v3-other-mscale": Case("v3", {"rope_scaling": yarn(40, 64) | {"mscale": 0.707}}),
    "v3-ramp-not-truncated": Case("v3", {"rope_scaling": yarn(40, 64) | {"truncate": False}}),
    "v3-attention-factor": Case("v3", {"rope_scaling": yarn(40, 64) | {"attention_factor": 1.2}}),
    "v3-weights-not-normed": Case("v3", {"norm_topk_prob": False}),
    "kimi": Case("kimi", {}),
    "kimi-ramp-of-no-width": Case("kimi", {"rope_scaling": yarn(32.0, 5, fast=1.0)}),
    "moonlight": Case("moonlight", {}),
    "glm-lite": Case("glm-lite", {}),
    "v2": Case("v2", {}),
    "v2-lite": Case("v2-lite", {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            case = CASES[name]
            made[name] = write_random_checkpoint(
                tmp_path_factory.mktemp(name),
                family_config(case.family, **case.overrides),
                dtype=torch.float32,
                tokenizer=False,
                bias_shift=case.bias_shift,
            )
        return made[name]

    return make


@pytest.fixture(scope="module")
def expected(checkpoint: Any) -> Any:
    """(tokens, reference output) by case: prompts reach past YaRN's original length of 64."""
    made: dict[str, tuple[list[int], ReferenceOutput]] = {}

    def make(name: str) -> tuple[list[int], ReferenceOutput]:
        if name not in made:
            tokens = random_tokens(90, seed=3)
            made[name] = tokens, ReferenceModel(checkpoint(name)).forward(tokens)
        return made[name]

    return make


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Any:
    try:
        return create_kernels(request.param).kernels
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count,), generator=generator).tolist()


def load(path: Path, kernels: Any, deterministic: bool = True, **more: Any) -> DeepSeekModel:
    return load_model(
        path,
        dtype=torch.float32,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        deterministic=deterministic,
        **more,
    )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_transformers(
    name: str, checkpoint: Any, expected: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    path = checkpoint(name)
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "kimi_k2":  # unknown to transformers; the same model as V3
        for file in path.iterdir():
            shutil.copy(file, tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
        path = tmp_path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens, reference = expected(name)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    assert difference(logits, reference.logits) <= TOLERANCE
    assert float(logits.abs().max()) > 1  # a bound of 1e-4 means something


@pytest.mark.parametrize("fp8", ["fp32", "pow2"])
def test_fp8_equals_transformers(fp8: str, tmp_path: Path) -> None:
    """Dims are multiples of 128: transformers cannot dequantise ragged blocks without a GPU."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.logging.set_verbosity_error()
    dims = {"q_lora_rank": 128, "qk_rope_head_dim": 128, "num_nextn_predict_layers": 0}
    config = family_config("v3", num_hidden_layers=2, **dims)
    write_random_checkpoint(tmp_path, config, fp8=fp8, num_shards=2, tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = random_tokens(40, seed=3)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    assert difference(logits, ReferenceModel(tmp_path).forward(tokens).logits) <= TOLERANCE
    runner = OfflineRunner(load(tmp_path, create_kernels("torch").kernels), num_blocks=8)
    assert difference(logits, runner.step({0: tokens}).logits[0]) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_model_equals_reference(name: str, checkpoint: Any, expected: Any, kernels: Any) -> None:
    """A prompt in one step, then the same prompt in chunks with decode steps at its end."""
    tokens, reference = expected(name)
    runner = OfflineRunner(load(checkpoint(name), kernels), num_blocks=16, block_size=16)
    whole = runner.step({0: tokens})
    assert difference(whole.logits[0], reference.logits) <= TOLERANCE
    assert difference(whole.hidden[0], reference.hidden) <= TOLERANCE
    parts = [tokens[:33], tokens[33:70], *([t] for t in tokens[70:80])]
    logits = torch.cat([runner.step({1: part}).logits[1] for part in parts])
    assert difference(logits, reference.logits[:80]) <= TOLERANCE


def test_mixed_batches(checkpoint: Any, kernels: Any) -> None:
    """Decode rows, chunks and fresh prompts of different sequences in one step."""
    path = checkpoint("v3")
    model, reference = load(path, kernels), ReferenceModel(path)
    prompts = {s: random_tokens(n, seed=s) for s, n in enumerate((40, 7, 25, 1))}
    wanted = {s: reference.forward(p).logits for s, p in prompts.items()}
    runner = OfflineRunner(model, num_blocks=32, block_size=4)
    runner.step({0: prompts[0][:39], 2: prompts[2][:10]})
    got = runner.step({3: prompts[3], 0: prompts[0][39:], 2: prompts[2][10:], 1: prompts[1]}).logits
    for sequence, logits in got.items():
        assert difference(logits, wanted[sequence][-len(logits) :]) <= TOLERANCE
    assert runner.step({}).logits == {}  # no rows at all is an ordinary step


@pytest.mark.parametrize("name", ["v3", "glm-lite", "v2-lite"])
def test_fast_mode_with_naive_attention(
    name: str, checkpoint: Any, expected: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, reference = expected(name)
    model = load(checkpoint(name), kernels, deterministic=False)
    monkeypatch.setattr(model, "_naive_from", 8)
    runner = OfflineRunner(model, num_blocks=32, block_size=8)
    first = runner.step({0: tokens[:50], 1: tokens[:3]})  # both forms in one step
    second = runner.step({1: tokens[3:4], 0: tokens[50:70]})
    third = runner.step({0: tokens[70:]})
    logits = torch.cat([out.logits[0] for out in (first, second, third)])
    assert difference(logits, reference.logits) <= TOLERANCE
    assert difference(torch.cat([first.logits[1], second.logits[1]]), logits[:4]) <= TOLERANCE


def test_fast_mode_goes_naive_where_that_is_less_work(
    checkpoint: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(checkpoint("v3"), kernels, deterministic=False)
    # 128 * (32 + 32) to expand a position, (2 * 128 + 16) - (32 + 16 + 32) saved by each query
    assert naive_from(model.config) == 43
    seen: list[int] = []
    naive = type(kernels).naive_attention

    def spy(self: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(q))
        return naive(self, q, *rest)

    monkeypatch.setattr(type(kernels), "naive_attention", spy)
    runner = OfflineRunner(model, num_blocks=16)
    runner.step({0: random_tokens(42, 1)})
    assert seen == []
    runner.step({0: [1], 1: random_tokens(43, 1), 2: [5, 6]})
    assert seen == [43] * 4  # the long sequence alone, in each layer
    runner = OfflineRunner(load(checkpoint("v3"), kernels), num_blocks=16)
    runner.step({0: random_tokens(90, 1)})
    assert seen == [43] * 4  # never in deterministic mode


@pytest.mark.parametrize("name", ["v3", "glm-lite"])
def test_mtp_equals_reference(name: str, checkpoint: Any, expected: Any, kernels: Any) -> None:
    tokens, reference = expected(name)
    model = load(checkpoint(name), kernels)
    following = [*tokens[1:], 7]
    wanted = ReferenceModel(checkpoint(name)).draft(reference.hidden, following)
    runner = OfflineRunner(model, num_blocks=16)
    hidden = runner.step({0: tokens}).hidden[0]
    parts = []
    for begin, end in ((0, 50), (50, 51), (51, 90)):
        parts.append(runner.draft({0: hidden[begin:end]}, {0: following[begin:end]}))
    assert difference(torch.cat([p.logits[0] for p in parts]), wanted.logits) <= TOLERANCE
    assert difference(torch.cat([p.hidden[0] for p in parts]), wanted.hidden) <= TOLERANCE
    assert runner.draft({}, {}).logits == {}
    with pytest.raises(ValueError, match="1 MTP layers"):
        runner.draft({0: hidden[:1]}, {0: [1]}, depth=1)


def test_two_mtp_layers(tmp_path: Path, kernels: Any) -> None:
    """Each has weights and a cache layer of its own; the second feeds on the first's hidden."""
    config = family_config("v3", num_hidden_layers=2, num_nextn_predict_layers=2)
    write_random_checkpoint(tmp_path, config, dtype=torch.float32, tokenizer=False)
    model, reference = load(tmp_path, kernels), ReferenceModel(tmp_path)
    assert model.cache_spec.num_layers == 4 and len(model.expert_weights()) == 3
    tokens = random_tokens(20, seed=5)
    first, second = [*tokens[1:], 7], [*tokens[2:], 7, 8]
    wanted = reference.forward(tokens)
    one = reference.draft(wanted.hidden, first)
    two = reference.draft(one.hidden, second, depth=1)
    runner = OfflineRunner(model, num_blocks=8)
    hidden = runner.step({0: tokens}).hidden
    got_one = runner.draft(hidden, {0: first})
    assert difference(got_one.logits[0], one.logits) <= TOLERANCE
    runner.rewind_drafts(0)
    got_two = runner.draft(got_one.hidden, {0: second}, depth=1)
    assert difference(got_two.logits[0], two.logits) <= TOLERANCE


def test_mtp_equals_transformers(
    checkpoint: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    transformers.logging.set_verbosity_error()
    # The class only knows an MTP layer by the released model's index, 61.
    cls = transformers.DeepseekV3ForCausalLM
    monkeypatch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.4.*"])
    main = cls.from_pretrained(checkpoint("v3"), dtype=torch.float32, attn_implementation="eager")
    mtp = MtpModel.from_pretrained(main.eval()).eval()
    tokens, reference = expected("v3")
    following = [*tokens[1:], 7]
    wanted = ReferenceModel(checkpoint("v3")).draft(reference.hidden, following)
    with torch.no_grad():
        positions = torch.arange(len(tokens))[None] + 1
        inputs = torch.tensor([following])
        hidden = mtp.forward_layer(0, reference.hidden[None], positions, None, input_ids=inputs)
        logits = mtp._project_to_logits(hidden)[0]
    assert difference(logits, wanted.logits) <= TOLERANCE


def test_routing_of_the_reference_is_what_the_gate_counts(
    checkpoint: Any, expected: Any, kernels: Any
) -> None:
    tokens, reference = expected("v3-eight-groups")
    seen: dict[int, list[int]] = {}
    parts: dict[str, float] = {}

    class Observer:
        def expert_picks(self, layer: int, ids: torch.Tensor) -> None:
            seen[layer] = count_picks(ids, 16).tolist()

        def rows_sent(self, layer: int, rows: list[int]) -> None:
            assert rows == [len(tokens)]

        def part(self, name: str, seconds: float) -> None:
            parts[name] = parts.get(name, 0.0) + seconds

    model = load(checkpoint("v3-eight-groups"), kernels)
    OfflineRunner(model, num_blocks=16).step({0: tokens}, Observer())
    assert sorted(seen) == [0, 1, 2]
    for layer, picks in enumerate(reference.routing):
        counts = [sum(expert in chosen for chosen in picks) for expert in range(16)]
        assert seen[layer] == counts
    assert set(parts) == {"attention", "gate", "dispatch", "experts", "combine", "other"}
    assert all(seconds >= 0 for seconds in parts.values())
