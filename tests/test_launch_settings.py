"""Flags, TOML and ServeConfig: one table, every problem at once, nothing unused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dispatch import dispatcher_names
from ep.placement import ExpertPlacement
from launch.settings import FLAGS, OFFLINE, SERVING, Given
from models.deepseek.config import DeepSeekConfig
from moeserve.config import ServeConfig, parse_size
from moeserve.errors import ConfigError

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder in which tests may write."""
    for file in TINY.glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def resolve(folder: Path | None, toml: str = "", sections=SERVING, **flags) -> ServeConfig:
    file = None
    if toml and folder:
        file = folder / "settings.toml"
        file.write_text(toml)
    return Given(folder, file, flags, sections).resolve()


def problems(*args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(*args, **kwargs)
    return caught.value.problems


def test_every_setting_has_exactly_one_flag():
    settings = [
        (section, field)
        for section, info in ServeConfig.model_fields.items()
        for field in info.annotation.model_fields
        if field != "checkpoint"  # the argument
    ]
    assert sorted((f.section, f.field) for f in FLAGS) == sorted(settings)
    assert len({f.field for f in FLAGS}) == len(FLAGS), "two flags of one name"


def test_switches_are_the_boolean_settings():
    for flag in FLAGS:
        info = ServeConfig.model_fields[flag.section].annotation.model_fields[flag.field]
        assert flag.switch == (info.annotation is bool), flag


def test_the_help_shows_the_real_defaults():
    for flag in FLAGS:
        value = getattr(getattr(ServeConfig(), flag.section), flag.field)
        if value is None or value == "":
            continue  # what stands for it is in words
        shown = {"on": True, "off": False}[flag.default] if flag.switch else flag.default
        if flag.metavar == "SIZE":
            shown = parse_size(flag.default)
        assert type(value)(shown) == value, flag


def test_the_folder_one_stands_in_is_a_checkpoint_too(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert resolve(Path(".")).model.checkpoint == Path(".")


def test_own_problems_come_with_all_others(tmp_path):
    given = Given(tmp_path, None, {"parallel": {"ep": "x"}}, SERVING)
    with pytest.raises(ConfigError) as caught:
        given.resolve(own=["--batch 'x': wrong"])
    first, second, third = caught.value.problems
    assert "--batch" in first and "'x'" in second and "config.json" in third


def test_flags_win_over_toml_over_defaults(folder):
    config = resolve(folder, "[parallel]\nep = 2\nredundant_experts = 3\n", parallel={"ep": "4"})
    assert (config.parallel.ep, config.parallel.redundant_experts) == (4, 3)
    assert config.cache.block_size == 16
    assert config.model.checkpoint == folder


def test_settings_that_a_command_has_no_use_for(folder):
    file = folder / "settings.toml"
    file.write_text("[engine]\nseed = 3\nthreads = 1\n")
    given = Given(folder, file, {}, SERVING, without=("engine.seed", "engine.lockstep_timeout"))
    with pytest.raises(ConfigError) as caught:
        given.resolve()
    assert caught.value.problems == ["engine.seed is not used by this command"]


def test_checkpoint_may_stand_in_the_toml_file(folder):
    file = folder / "s.toml"
    file.write_text(f"[model]\ncheckpoint = {str(folder)!r}\n")
    assert Given(None, file, {}, SERVING).resolve().model.checkpoint == folder


def test_all_problems_come_at_once(folder):
    found = problems(
        folder,
        "[cache]\nblok_size = 4\n[nonsense]\nx = 1\n",
        parallel={"ep": "two"},
        server={"port": "70000"},
        model={"dtype": "int3"},
    )
    for part in ("cache.blok_size=4", "block_size", "nonsense", "parallel.ep='two'",
                 "server.port='70000'", "model.dtype='int3'"):  # fmt: skip
        assert any(part in line for line in found), (part, found)


def test_bad_settings_and_missing_checkpoint_come_together(tmp_path):
    found = problems(tmp_path / "gone", parallel={"ep": "0"})
    assert any("parallel.ep='0'" in line for line in found)
    assert any("no such folder" in line for line in found)


@pytest.mark.parametrize(
    "toml, part",
    [("[cache", "not valid TOML"), ("cache = 3", "cache"), ("[server]\nport = 1", "[server]")],
)
def test_broken_or_unused_toml(folder, toml, part):
    assert any(part in line for line in problems(folder, toml, sections=OFFLINE))


def test_missing_toml_file(folder):
    with pytest.raises(ConfigError, match="cannot be read"):
        Given(folder, folder / "gone.toml", {}, SERVING).resolve()


def test_missing_files_come_with_wrong_values(folder):
    found = problems(
        folder,
        parallel={"ep": "x", "placement": "/gone/p.json"},
        cache={"kv_memory": "1G", "kv_tokens": "10"},
    )
    for part in ("parallel.ep='x'", "'/gone/p.json': no such file", "not both"):
        assert any(part in line for line in found), (part, found)


def test_settings_that_exclude_each_other(folder):
    found = problems(folder, cache={"kv_memory": 1000, "kv_tokens": "10"})
    assert any("not both" in line for line in found)


@pytest.mark.parametrize(
    "section, field",
    [("model", "chat_template"), ("model", "kernel_table"), ("parallel", "placement")],
)
def test_files_named_by_settings_must_exist(folder, section, field):
    given = {section: {field: "/gone/file"}} | {"engine": {"deterministic": "false"}}
    found = problems(folder, **given)
    assert any(f"{section}.{field}='/gone/file': no such file" in line for line in found)
    given = {section: {field: str(folder)}} | {"engine": {"deterministic": "false"}}
    found = problems(folder, **given)
    assert any(f"{section}.{field}='{folder}': is a folder, not a file" in line for line in found)


@pytest.mark.parametrize(
    "text, problem", [("{", "not a placement file"), (None, "has 2 ranks, needs 1")]
)
def test_a_placement_file_is_read_before_any_rank_starts(folder, text, problem):
    file = folder / "placement.json"
    if text is None:
        raw = json.loads((folder / "config.json").read_text())
        layers = DeepSeekConfig.from_hf(raw).num_placement_layers(True)
        ExpertPlacement.trivial(layers, 32, 2, 0).save(file)
    else:
        file.write_text(text)
    (found,) = problems(folder, parallel={"placement": str(file)})
    assert found.startswith(f"parallel.placement={file}: {problem}")
    # Under torchrun ranks find that together, and one of them says it.
    given = Given(folder, None, {"parallel": {"placement": str(file)}}, SERVING)
    assert given.resolve(on_rank=True).parallel.placement == file


def test_the_help_names_every_dispatcher():
    (flag,) = (f for f in FLAGS if f.field == "dispatch")
    assert all(f"{name}," in flag.help or f"{name} or" in flag.help for name in dispatcher_names())


@pytest.mark.parametrize("sections", [SERVING, OFFLINE])
def test_how_tokens_travel_is_checked_before_any_rank_starts(folder, sections):
    parallel = {"ep": "0", "dispatch": "Torch", "wire": "FP8", "overlap": "0"}
    given = Given(folder, None, {"parallel": parallel}, sections)
    with pytest.raises(ConfigError) as caught:
        given.resolve()
    found = [given.in_users_words(line) for line in caught.value.problems]
    assert [line.partition(" ")[0] for line in found] == [f"--{name}" for name in parallel]
    for line, nearest in zip(found, ("1", "torch", "fp8", "1"), strict=True):
        assert f"nearest: {nearest}" in line or f"nearest valid: {nearest}" in line, line


def test_emulate_without_an_emulation_is_told_in_flags(folder):
    given = Given(folder, None, {"parallel": {"dispatch": "torch", "emulate": True}}, SERVING)
    with pytest.raises(ConfigError) as caught:
        given.resolve()
    (found,) = map(given.in_users_words, caught.value.problems)
    assert found.startswith("--emulate: --dispatch torch has no emulation; those that have: deepep")


def test_names_are_checked_without_torch():
    code = (
        "import sys; from moeserve.config import ServeConfig; "
        "ServeConfig.load(None, {'parallel': {'dispatch': 'decode=deepep_ll', 'emulate': True}}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=TINY.parents[1]).returncode == 0


def test_an_empty_host_is_not_every_address(folder):
    (found,) = problems(folder, server={"host": ""})
    assert found == "server.host='': must not be empty"


def test_a_device_that_is_not_here_comes_with_all_others(tmp_path, folder, monkeypatch):
    from moeserve.device import choose

    monkeypatch.setattr(choose, "look", lambda: choose.Cuda("13.0", 1))
    cuda = {"engine": {"device": "cuda"}}
    absent = tmp_path / "absent"

    def found(checkpoint, ranks_here=None, **sections):
        try:
            Given(checkpoint, None, cuda | sections, SERVING).resolve(ranks_here=ranks_here)
        except ConfigError as error:
            return error.problems
        return []

    assert found(folder) == []
    two = {"parallel": {"ep": "2"}}
    said = "engine.device='cuda': 2 ranks here and 1 CUDA device is seen"
    (only,) = found(folder, **two)
    assert only.startswith(said) and found(folder, 0, **two) == found(folder, 1, **two) == []
    gone, device = found(absent, **two)
    assert "no such folder" in gone and device.startswith(said)
    monkeypatch.setattr(choose, "look", lambda: choose.Cuda(None, 0))
    every = found(absent, schedule={"token_budget": "none"})
    assert len(every) == 3 and any("built without CUDA" in problem for problem in every)
    assert len(found(absent, 0)) == 1


def test_checkpoint_without_config_json(tmp_path):
    assert any("holds no config.json" in line for line in problems(tmp_path))
    assert any("not given" in line for line in problems(None))
