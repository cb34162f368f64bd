"""The emulation of DeepEP's first API in one process: signatures, sizes, formats, rules, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dispatch.emulation as deep_ep
from dispatch.deepep import MAX_BUFFER_BYTES
from dispatch.emulation import Buffer, BufferRuleError, HostAssertion
from dispatch.emulation.quantise import quantise, through_logfmt
from dispatch.emulation.signatures import SIGNATURES, fork_signatures, read_signatures
from dispatch.fp8 import pack_exponents

M, D, E, K = 8, 2048, 4, 3


class Alone:
    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1


def make(**options: Any) -> Buffer:
    hint = Buffer.get_low_latency_rdma_size_hint(M, D, 1, E)
    options = {"num_rdma_bytes": hint, "low_latency_mode": True, **options}
    return Buffer(None, comm=Alone(), **options)


def inputs(tokens: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=g).bfloat16()
    idx = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].contiguous()
    idx[torch.rand(tokens, K, generator=g) < 0.3] = -1
    return x, idx, torch.rand(tokens, K, generator=g)


@pytest.mark.parametrize("version", list(SIGNATURES))
def test_signatures_are_those_of_the_library(version: str) -> None:
    for name, members in SIGNATURES[version].items():
        emulated = getattr(deep_ep, name)
        for member, parameters in members.items():
            found = list(inspect.signature(getattr(emulated, member)).parameters.values())
            found = [p for p in found if p.name != "self"]
            want = [(n, inspect.Parameter.empty if d is ... else d) for n, d in parameters]
            assert [(p.name, p.default) for p in found] == want, f"{name}.{member}"
        public = {
            n for n, value in vars(emulated).items() if not n.startswith("_") and callable(value)
        }
        static = {n for n, v in vars(emulated).items() if isinstance(v, staticmethod)}
        assert (public | static) <= set(members), f"{name} has members the library has not"


def test_signatures_are_read_from_source() -> None:
    source = Path(inspect.getsourcefile(Buffer) or "").read_text()
    read = read_signatures(source, "Buffer")
    assert read == SIGNATURES["2.1.0"]["Buffer"]
    assert read_signatures("class A:\n def f(self, a, b=x.y): 0\n def _g(self): 0", "A") == {
        "f": (("a", ...), ("b", "x.y"))
    }


def test_the_fork_has_parameters_in_between() -> None:
    fork = fork_signatures()
    names = [name for name, _ in fork["low_latency_dispatch"]]
    assert names.index("x_global_scale") == names.index("use_fp8") - 1
    assert fork["__init__"][7] == ("use_fabric", None)
    assert fork["combine"] == SIGNATURES["2.1.0"]["Buffer"]["combine"]


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "gib"),
    [
        (128, 7168, 256, 1.78),
        (128, 7168, 288, 2.00),
        (512, 7168, 256, 7.11),
        (1024, 7168, 288, 16.0),
        (1840, 5120, 448, 31.94),
        (1856, 5120, 448, 32.21),
    ],
)
def test_buffer_size(tokens: int, hidden: int, experts: int, gib: float) -> None:
    sizes = {Buffer.get_low_latency_rdma_size_hint(tokens, hidden, r, experts) for r in (1, 8, 64)}
    (size,) = sizes  # the number of ranks does not matter
    assert size % 128 == 0 and size / 2**30 == pytest.approx(gib, abs=0.006)
    assert (size <= MAX_BUFFER_BYTES) is (gib < 32)


def test_buffer_size_to_the_byte() -> None:
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) / 1e6 == pytest.approx(
        1908.41, abs=0.005
    )


@pytest.mark.parametrize(
    ("options", "dtype", "scale_shape", "scale_strides", "scale_dtype", "tolerance"),
    [
        ({"use_fp8": False}, torch.bfloat16, None, None, None, 0.0),
        ({}, torch.float8_e4m3fn, (E, M, 16), (16 * M, 1, M), torch.float32, 0.065),
        ({"round_scale": True}, torch.float8_e4m3fn, (E, M, 16), (16 * M, 1, M), None, 0.065),
        (
            {"round_scale": True, "use_ue8m0": True},
            torch.float8_e4m3fn,
            (E, M, 4),
            (4 * M, 1, M),
            torch.int32,
            0.065,
        ),
    ],
)
def test_dispatch_gives_rows_in_the_stated_form(
    options: dict[str, bool],
    dtype: torch.dtype,
    scale_shape: Any,
    scale_strides: Any,
    scale_dtype: Any,
    tolerance: float,
) -> None:
    x, idx, _ = inputs()
    stats, waits = torch.ones(E, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    recv, count, handle, event, hook = make().low_latency_dispatch(
        x,
        idx,
        M,
        E,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waits,
        **options,
    )
    assert hook is None and event.event is None
    with pytest.raises(AssertionError):
        event.current_stream_wait()
    src_info, layout, *rest = handle
    assert rest == [M, D, E]
    assert src_info.shape == (E, M) and src_info.dtype == torch.int32
    assert layout.shape == (E, 1) and layout.dtype == torch.int64
    assert count.dtype == torch.int32
    picked = torch.bincount(idx[idx >= 0], minlength=E)
    assert torch.equal(count.long(), picked) and torch.equal(stats.long(), picked + 1)
    rows, scales = recv if isinstance(recv, tuple) else (recv, None)
    assert rows.dtype == dtype and rows.shape == (E, M, D) and rows.is_contiguous()
    if scales is not None:
        assert scales.shape == scale_shape and scales.stride() == scale_strides
        assert scales.dtype == (scale_dtype or torch.float32)
    for e in range(E):
        n = int(count[e])
        assert int(layout[e, 0]) >> 32 == 0 and int(layout[e, 0]) & 0xFFFFFFFF == n
        tokens = src_info[e, :n].long()
        assert sorted(tokens.tolist()) == (idx == e).any(1).nonzero().squeeze(1).tolist()
        values = rows[e, :n].float()
        if scales is not None:
            s = scales[e, :n]
            if s.dtype == torch.int32:
                s = torch.stack([((s >> (8 * i)) & 0xFF) - 127 for i in range(4)], -1).flatten(1)
                s = torch.exp2(s.float())
            elif options:
                assert torch.equal(torch.exp2(s.log2().round()), s)
            values = values * s.repeat_interleave(128, 1)
        want = x[tokens].float()
        if n:
            assert float(((values - want).abs() / want.abs().clamp_min(0.05)).max()) <= tolerance
        # What is not valid is poison: whoever reads it will see.
        assert rows[e, n:].float().isnan().all() and (src_info[e, n:] == -1).all()
        if scales is not None and scales.is_floating_point():
            assert scales[e, n:].isnan().all()


def test_nothing_is_there_before_the_hook() -> None:
    b = make()
    x, idx, w = inputs()
    recv, count, handle, _, hook = b.low_latency_dispatch(
        x, idx, M, E, use_fp8=False, return_recv_hook=True
    )
    assert recv.isnan().all() and (count == -1).all() and (handle[0] == -1).all()
    with pytest.raises(BufferRuleError, match="hook not called"):
        b.low_latency_combine(recv, idx, w, handle)
    x.zero_()  # sent is sent
    hook()
    assert (count >= 0).all() and float(recv.nan_to_num().abs().max()) > 1
    with pytest.raises(HostAssertion, match="called once"):
        hook()
    y = torch.where(recv.isnan(), 0, recv)
    out, _, hook = b.low_latency_combine(y, idx, w, handle, return_recv_hook=True)
    assert out.isnan().all()
    w.zero_()
    hook()
    assert not out.isnan().any() and float(out.abs().max()) > 1


def test_an_event_is_waited_for_too() -> None:
    b = make()
    x, idx, w = inputs()
    recv, count, handle, event, hook = b.low_latency_dispatch(
        x, idx, M, E, use_fp8=False, async_finish=True
    )
    assert hook is None and (count == -1).all()
    said: list[str] = []
    event.register_hook_after_wait(lambda: said.append("after"))
    with event(release_handle=True):
        assert said == []
    assert (count >= 0).all() and said == ["after"] and event.event is None
    out, event, _ = b.low_latency_combine(recv.nan_to_num(), idx, w, handle, async_finish=True)
    assert out.isnan().all()
    event.current_stream_wait()
    want = x.float() * torch.where(idx >= 0, w, 0).sum(1, keepdim=True)
    assert torch.allclose(out.float(), want, rtol=0.01, atol=0.01)
    with pytest.raises(HostAssertion, match="exclude each other"):
        b.low_latency_dispatch(x, idx, M, E, async_finish=True, return_recv_hook=True)


def test_combine_writes_where_it_is_told_and_takes_rows_from_its_own_buffer() -> None:
    b = make()
    x, idx, w = inputs()
    want = x.float() * torch.where(idx >= 0, w, 0).sum(1, keepdim=True)
    for options in ({}, {"use_logfmt": True}, {"zero_copy": True}):
        recv, _, handle, _, _ = b.low_latency_dispatch(x, idx, M, E, use_fp8=False)
        out = torch.empty_like(x)
        y = recv.nan_to_num()
        if options.get("zero_copy"):
            with pytest.raises(BufferRuleError, match="comes first"):
                b.low_latency_combine(y, idx, w, handle, zero_copy=True)
            lent = b.get_next_low_latency_combine_buffer(handle)
            assert lent.shape == (E, M, D) and not lent.is_contiguous() and lent.stride(2) == 1
            lent[:] = recv
            y = torch.zeros_like(y)
        got, _, _ = b.low_latency_combine(y, idx, w, handle, out=out, **options)
        assert got is out
        assert torch.allclose(out.float(), want, rtol=0.03, atol=0.02), options


def test_a_third_result_is_an_error() -> None:
    b = make()
    x, idx, w = inputs()
    held = [b.low_latency_dispatch(x, idx, M, E, use_fp8=False) for _ in range(2)]
    with pytest.raises(BufferRuleError, match="two low-latency results are outstanding"):
        b.low_latency_dispatch(x, idx, M, E)
    for recv, _, handle, _, _ in held:
        b.low_latency_combine(recv.nan_to_num(), idx, w, handle)
    del handle
    held = [b.low_latency_dispatch(x, idx, M, E) for _ in range(2)]
    held.pop()  # let go of: not outstanding any more
    held.append(b.low_latency_dispatch(x, idx, M, E))


def test_dispatch_and_combine_are_not_in_flight_together() -> None:
    b = make()
    x, idx, w = inputs()
    y = torch.zeros(E, M, D).bfloat16()
    first = b.low_latency_dispatch(x, idx, M, E)
    *_, dispatched = second = b.low_latency_dispatch(x, idx, M, E, return_recv_hook=True)
    with pytest.raises(BufferRuleError, match="combine while a dispatch is in flight"):
        b.low_latency_combine(y, idx, w, first[2])
    dispatched()
    *_, combined = b.low_latency_combine(y, idx, w, first[2], return_recv_hook=True)
    with pytest.raises(BufferRuleError, match="dispatch while a combine is in flight"):
        b.low_latency_dispatch(x, idx, M, E)
    combined()
    b.low_latency_combine(y, idx, w, second[2])


def test_a_handle_belongs_to_its_buffer() -> None:
    x, idx, w = inputs()
    _, _, handle, _, _ = make().low_latency_dispatch(x, idx, M, E)
    with pytest.raises(BufferRuleError, match="not one that this buffer"):
        make().low_latency_combine(torch.zeros(E, M, D).bfloat16(), idx, w, handle)
    b = make()
    _, _, handle, _, _ = b.low_latency_dispatch(x, idx, M, E)
    with pytest.raises(BufferRuleError, match="not dispatched to"):
        other = torch.where(idx < 0, 0, idx)
        b.low_latency_combine(torch.zeros(E, M, D).bfloat16(), other, w, handle)


def test_normal_mode_leaves_the_buffer_dirty() -> None:
    b = make(num_nvl_bytes=128 * 10**6)
    b._ll.dirty = True  # one rank has no normal mode; see the tests with ranks
    x, idx, _ = inputs()
    with pytest.raises(BufferRuleError, match="clean_low_latency_buffer"):
        b.low_latency_dispatch(x, idx, M, E)
    b.clean_low_latency_buffer(M, D, E)
    b.low_latency_dispatch(x, idx, M, E)


BAD_CALLS: list[tuple[str, type[Exception], Callable[[Buffer, Any, Any], Any]]] = [
    ("bfloat16", HostAssertion, lambda b, x, i: b.low_latency_dispatch(x.float(), i, M, E)),
    ("T=9 <= M=8", HostAssertion, lambda b, x, i: b.low_latency_dispatch(*inputs(9)[:2], M, E)),
    ("int64", HostAssertion, lambda b, x, i: b.low_latency_dispatch(x, i.int(), M, E)),
    ("agree in T", HostAssertion, lambda b, x, i: b.low_latency_dispatch(x[:4], i, M, E)),
    ("multiple|% 4", HostAssertion, lambda b, x, i: b.low_latency_dispatch(x, i, 6, E)),
    ("num_rdma_bytes", HostAssertion, lambda b, x, i: b.low_latency_dispatch(x, i, 16, E)),
    (
        "NVSHMEM_QP_DEPTH=1024",
        AssertionError,
        lambda b, x, i: b.low_latency_dispatch(x, i, 512, E),
    ),
    (
        "needs round_scale",
        HostAssertion,
        lambda b, x, i: b.low_latency_dispatch(x, i, M, E, use_ue8m0=True),
    ),
    (
        "D=1536 is one of",
        HostAssertion,
        lambda b, x, i: b.low_latency_dispatch(x[:, :1536].contiguous(), i, M, E),
    ),
    (
        "divides by 512",
        HostAssertion,
        lambda b, x, i: b.low_latency_dispatch(x[:, :1920].contiguous(), i, M, E),
    ),
    (
        "K=12 <= 11",
        HostAssertion,
        lambda b, x, i: b.low_latency_dispatch(x, i.repeat(1, 4), M, E),
    ),
    (
        "picks an expert twice",
        BufferRuleError,
        lambda b, x, i: b.low_latency_dispatch(x, i.repeat(1, 2), M, E),
    ),
    ("0..3", BufferRuleError, lambda b, x, i: b.low_latency_dispatch(x, i + 2, M, E)),
    (
        r"int32 \[4\]",
        HostAssertion,
        lambda b, x, i: b.low_latency_dispatch(x, i, M, E, torch.zeros(4)),
    ),
    (
        r"int64 \[1\]",
        HostAssertion,
        lambda b, x, i: b.low_latency_dispatch(
            x, i, M, E, None, torch.zeros(1, 1, dtype=torch.int64)
        ),
    ),
    ("enable_shrink", HostAssertion, lambda b, x, i: b.low_latency_update_mask_buffer(0, True)),
    (
        "enable_shrink",
        HostAssertion,
        lambda b, x, i: b.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
    ),
    ("enable_shrink", HostAssertion, lambda b, x, i: b.low_latency_clean_mask_buffer()),
    ("explicitly_destroy", AssertionError, lambda b, x, i: b.destroy()),
    ("Unsupported number", AssertionError, lambda b, x, i: b.get_dispatch_config(12)),
    ("Unsupported number", AssertionError, lambda b, x, i: b.get_combine_config(56)),
    ("SM count must be even", AssertionError, lambda b, x, i: b.set_num_sms(21)),
]


@pytest.mark.parametrize(("message", "kind", "call"), BAD_CALLS)
def test_limits_are_errors_of_the_same_kind(message: str, kind: type[Exception], call: Any) -> None:
    x, idx, _ = inputs()
    with pytest.raises(kind, match=message):
        call(make(), x, idx)


@pytest.mark.parametrize(
    ("message", "kind", "options"),
    [
        ("low_latency_mode=True", HostAssertion, {"low_latency_mode": False, "num_rdma_bytes": 0}),
        ("multiple of 128", HostAssertion, {"num_rdma_bytes": 100}),
        ("under 32 GiB", HostAssertion, {"num_rdma_bytes": 2**35}),
        ("num_qps_per_rank > 0", AssertionError, {"num_qps_per_rank": 0}),
        ("covers L=4", HostAssertion, {"num_qps_per_rank": 3}),
    ],
)
def test_a_buffer_refuses_what_it_cannot_be(
    message: str, kind: type[Exception], options: dict[str, Any]
) -> None:
    x, idx, _ = inputs()
    with pytest.raises(kind, match=message):
        make(**options).low_latency_dispatch(x, idx, M, E)


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match="Either 'group' or 'comm' must be provided"):
        Buffer(None)


def test_queue_depth_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    x, idx, _ = inputs()
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "4096")
    big = Buffer.get_low_latency_rdma_size_hint(2048, D, 1, E)
    b = make(num_rdma_bytes=big)
    assert b.environment["NVSHMEM_QP_DEPTH"] == "4096"
    assert b.environment["NVSHMEM_IBGDA_NUM_RC_PER_PE"] == "24"
    b.low_latency_dispatch(x, idx, 512, E)
    with pytest.raises(BufferRuleError, match="wrong above 1024"):
        b.low_latency_dispatch(x, idx, 1028, E)


def test_a_destroyed_buffer_is_gone() -> None:
    b = make(explicitly_destroy=True)
    b.destroy()
    with pytest.raises(HostAssertion, match="not destroyed"):
        b.clean_low_latency_buffer(M, D, E)


def test_quantise_keeps_the_largest_and_packs_exponents() -> None:
    x = torch.zeros(2, 1024).bfloat16()
    x[0, 5], x[0, 300], x[1, 1000] = 448.0, -3.0, 0.5
    values, scale = quantise(x, round_scale=False)
    assert float(scale[0, 0]) == 1.0 and float(values[0, 5]) == 448.0
    assert float(scale[1, 0]) == pytest.approx(1e-4 / 448)  # empty blocks have a floor
    values, scale = quantise(x, round_scale=True)
    assert float(scale[0, 2]) == 2.0**-7  # 3 / 448 rounded up
    assert float(values[0, 300]) == -3 * 2**7
    packed = pack_exponents(scale)
    assert packed.shape == (2, 2) and packed.dtype == torch.int32
    assert (int(packed[0, 0]) >> 16) & 0xFF == 120 and int(packed[0, 0]) & 0xFF == 127


def test_the_logarithmic_format_is_near() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :64] = 0
    y = through_logfmt(x)
    assert torch.equal(y[0, :64], x[0, :64])
    assert float(((y - x).abs() / x.abs().clamp_min(0.01)).max()) < 0.03


def test_sizes_of_normal_mode() -> None:
    config = Buffer.get_dispatch_config(8)
    assert config.num_sms == Buffer.num_sms == 20
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    assert Buffer.get_dispatch_config(16).get_rdma_buffer_size_hint(14336, 16) > 0
    assert config.get_nvl_buffer_size_hint(14336, 8) % 128 == 0
    with pytest.raises(HostAssertion, match="multiple of it"):
        config.get_nvl_buffer_size_hint(14336, 9)
