"""The recipe of the bundled drafters: the training networks are what the engine runs, lessons have
the gradients that autograd finds, and what is counted is what service counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from launch.cli import app
from models.deepseek.config import DeepSeekConfig
from models.deepseek.tiny.evaluate import generate
from models.deepseek.tiny.heads.draft import Lesson, make_draft, read_draft, write_draft
from models.deepseek.tiny.heads.eagle import EagleNet
from models.deepseek.tiny.heads.evaluate import choices, held_out_prompts, right_drafts, runs
from models.deepseek.tiny.heads.features import Windows
from models.deepseek.tiny.heads.files import read_head, write_head
from models.deepseek.tiny.heads.generate import continuations
from models.deepseek.tiny.heads.medusa import MedusaNet
from models.deepseek.tiny.heads.objective import GREEDY, Disagreement, teacher
from models.deepseek.tiny.heads.train import eagle_loss, fit, medusa_loss
from models.deepseek.tiny.network import Network
from models.deepseek.tiny.release import load
from moeserve.speculate.eagle import EagleHead, eagle_forward, load_eagle
from moeserve.speculate.head_file import HeadFile

TINY = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"
DRAFTERS = TINY.parent / "tiny-drafters"
KINDS = ("eagle", "medusa", "draft")
VOCAB, SIZE = 96, 32


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def net() -> Network:
    return load(TINY)


def randomised(head: EagleNet | MedusaNet, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data += torch.randn(parameter.shape, generator=rng) * 0.15


def an_eagle() -> tuple[EagleNet, EagleHead]:
    """The training network, and the engine's head of the same tensors."""
    embed = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():  # its own start is drawn too: some are too near the tolerance
        torch.manual_seed(1)
        net = EagleNet(embed, 1e-6, heads=2, width=48)
    randomised(net)
    return net, load_eagle(HeadFile(net.published(), net.config(VOCAB)), SIZE, VOCAB)


def test_eagle_passes_are_what_the_engine_computes() -> None:
    net, head = an_eagle()
    rng = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (1, 9), generator=rng)
    hidden = torch.randn(1, 9, SIZE, generator=rng)
    with torch.no_grad():
        passes = net(tokens, hidden, 3, torch.float32)
    embedded, rows = net.embed[tokens[0]], torch.arange(9)
    for certain in range(1, 8):  # rows of the target's features; then two drafts
        past = head.no_past()
        seen = rows[:certain] <= rows[:certain, None]
        features, past = eagle_forward(
            head, embedded[:certain], hidden[0, :certain], rows[:certain], past, seen
        )
        last = features[-1:]
        torch.testing.assert_close(passes[0][0, certain - 1], last[0], rtol=1e-4, atol=1e-5)
        for depth in (1, 2):
            at = certain - 1 + depth
            if at >= 9:
                break
            mask = torch.ones(1, at + 1, dtype=torch.bool)
            last, past = eagle_forward(
                head, embedded[at : at + 1], last, rows[at : at + 1], past, mask
            )
            torch.testing.assert_close(passes[depth][0, at], last[0], rtol=1e-4, atol=1e-5)


def test_heads_come_back_from_their_files(net: Network, tmp_path: Path) -> None:
    for kind, head in (
        ("eagle", EagleNet(net.embed_tokens.detach(), 1e-6)),
        ("medusa", MedusaNet(net.s.hidden_size)),
    ):
        randomised(head)
        size = write_head(head, tmp_path / kind, net.s.vocab_size)
        assert size < 3_000_000
        back = read_head(kind, net, tmp_path / kind).published()
        for name, tensor in head.published().items():
            assert torch.equal(back[name], tensor.bfloat16().float()), name
    (tmp_path / "medusa" / "model.safetensors").rename(tmp_path / "eagle" / "model.safetensors")
    with pytest.raises(ValueError, match="tensor names differ"):
        read_head("eagle", net, tmp_path / "eagle")


def test_a_draft_model_is_a_checkpoint(tmp_path: Path) -> None:
    model = make_draft()
    assert write_draft(model, tmp_path, TINY) < 3_000_000
    config = DeepSeekConfig.from_hf(tmp_path)
    assert (config.num_hidden_layers, config.num_mtp_layers) == (2, 0)
    assert (tmp_path / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    back = read_draft(tmp_path)
    assert torch.equal(back.embed_tokens, model.embed_tokens.bfloat16().float())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        apart = (back(tokens, None)[0] - model.eval()(tokens, None)[0]).abs().mean()
    assert 0 < apart < 0.1  # FP8 and no more


def test_continuations_are_greedy_text(net: Network) -> None:
    prompts = held_out_prompts(TINY, 12, 1)[:2]
    found = continuations(net, prompts, 9, dtype=torch.float32)
    for row, prompt in zip(found.tolist(), prompts.tolist(), strict=True):
        expected = generate(net, prompt, 9, 0.0, 0)
        assert row[:12] == prompt and row[12 : 12 + len(expected)] == expected
    warm = [continuations(net, prompts, 9, 0.8, seed) for seed in (1, 1, 2)]
    assert torch.equal(warm[0], warm[1]) and not torch.equal(warm[0], warm[2])


# -- lessons --------------------------------------------------------------------------------------


def a_lesson() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(600, SIZE, generator=rng)  # more than a chunk
    head = torch.randn(VOCAB, SIZE, generator=rng) * 0.3
    return hidden, head, teacher(torch.randn(600, SIZE, generator=rng), head)[0]


def plain_loss(hidden: Tensor, head: Tensor, goal: Tensor) -> Tensor:
    return -(goal * torch.log_softmax(hidden @ head.t(), -1)).sum(-1).mean()


def test_lessons_have_the_gradients_of_autograd() -> None:
    hidden, head, goal = a_lesson()
    for of_head, function in ((False, Disagreement), (True, Lesson)):
        mine, theirs = (
            (hidden.clone().requires_grad_(), head.clone().requires_grad_(of_head)) for _ in "ab"
        )
        loss, choice = function.apply(mine[0], mine[1], goal)
        (loss * 3).backward()
        expected = plain_loss(*theirs, goal)
        (expected * 3).backward()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(choice, (hidden @ head.t()).argmax(-1))
        for a, b in zip(mine, theirs, strict=True):
            if b.requires_grad:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)


def test_the_teacher_is_half_choice() -> None:
    hidden, head, _ = a_lesson()
    goal, choice = teacher(hidden, head)
    p = torch.softmax(hidden @ head.t(), -1)
    assert torch.equal(choice, p.argmax(-1))
    rows = torch.arange(len(p))
    torch.testing.assert_close(goal[rows, choice], GREEDY + (1 - GREEDY) * p[rows, choice])
    torch.testing.assert_close(goal.sum(-1), torch.ones(600))


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_makes_drafts_better_and_the_same_again(kind: str, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(4)
    embed, head = (torch.randn(VOCAB, SIZE, generator=rng) for _ in range(2))
    tokens = torch.randint(VOCAB, (108, 13), generator=rng)
    # Features that tell the token after: a target that is easy to learn.
    windows = Windows(tokens, (0.3 * embed[tokens[:, :-1]] + head[tokens[:, 1:]]).bfloat16())
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        if kind == "eagle":
            eagle = EagleNet(embed, 1e-6, heads=2, width=48)
            net, drafts = eagle, eagle_loss(eagle, head, 2)
        else:
            medusa = MedusaNet(SIZE, heads=2, blocks=1)
            net, drafts = medusa, medusa_loss(medusa, head)
        with torch.no_grad():
            before = float(drafts(tokens, windows.hidden)[0])
        curve = fit(net, drafts, windows, 12, tmp_path / "log.jsonl")
        with torch.no_grad():
            found.append(float(drafts(tokens, windows.hidden)[0]))
        assert found[-1] < before and curve[-1]["step"] == 12
    assert found[0] == found[1]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert len(last["right"]) == 2 and "check" in last


# -- figures --------------------------------------------------------------------------------------


def test_runs_are_counted_as_in_service() -> None:
    right = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    # At 0 both are right: on to 3. There one is: on to 5, where 5 + 3 is the end.
    assert runs(right, 0, 2) == ([2, 2], [2, 1], 2)
    assert runs(right, 2, 2) == ([2, 2], [1, 0], 2)  # at 2 none, at 3 one
    assert runs(right, 6, 2) == ([0, 0], [0, 0], 0)


def test_drafts_are_compared_with_the_tokens_that_came() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    drafts = torch.tensor([[[7, 8, 0, 0]], [[8, 0, 9, 0]]])
    right = right_drafts(drafts, tokens)
    assert right[0, 0].tolist() == [True, True, False, False]
    assert right[1, 0].tolist() == [True, False, False, False]


def test_a_draft_that_is_the_target_is_always_right(net: Network) -> None:
    tokens = continuations(net, held_out_prompts(TINY, 8, 1)[:2], 10, dtype=torch.float32)
    with torch.no_grad():
        hidden, _ = net(tokens[:, :-1], None)
    drafts = choices(net, net.lm_head.detach(), tokens, hidden, 3)
    right = right_drafts(drafts, tokens)
    assert right[0, :, 7:-1].all() and right[1, :, 7:-2].all() and right[2, :, 7:-3].all()
    drafted, accepted, number = runs(right[:, 0], 7, 3)
    assert accepted == drafted == [number] * 3 and number > 0


# -- the bundled drafters -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_drafters_are_what_their_cards_say(kind: str) -> None:
    folder = DRAFTERS / kind
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    told = json.loads((folder / "eval.json").read_text())
    assert told["temperature"] == 0 and len(told["acceptance"]) == told["depth"] >= 3
    assert told["acceptance"] == sorted(told["acceptance"], reverse=True)
    card = (DRAFTERS / "README.md").read_text()
    assert f"{told['acceptance'][0]:.2f}" in card and f"{told['mean_accepted']:.2f}" in card


def test_bundled_drafters_draft_in_the_engine() -> None:
    """The heads get the features that they were trained on, at the right places: what they draft is
    accepted about as often as their figures say, and no token changes."""
    words = [x for kind in KINDS for x in ("--speculate", f"{kind}:{DRAFTERS / kind}:2")]
    size = ["--prompt-length", "48", "--output-length", "48", "--repeat", "1", "--warmup", "0"]
    command = ["bench", "speculate", str(TINY), *words, *size, "--batch", "6"]
    done = CliRunner().invoke(app, [*command, "--threads", "1", "--json", "-q"])
    assert done.exit_code == 0, done.output
    for kind, row in zip(KINDS, json.loads(done.stdout.splitlines()[-1])["rows"], strict=True):
        told = json.loads((DRAFTERS / kind / "eval.json").read_text())
        assert row["same_tokens"] is True and row["drafter"].startswith(kind)
        assert row["acceptance"][0] > told["acceptance"][0] - 0.2, kind
        assert row["mean_accepted"] > 0.4 * sum(told["acceptance"][:2]), kind
