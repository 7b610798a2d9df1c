"""Whether GPUs really reach each other: the probe of peer access, its verdict, and what follows.

Knows nothing of the kernel's steps but where its mutants break a link. GPUs are emulated ones in
processes of their own; lying pairs are the emulated driver's: it grants access, copies work, and
what kernels store or load goes elsewhere.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu.activate import environment
from emulated_gpu.child import run_in_child
from jobs import run_job

from gpuallreduce import jit
from gpuallreduce.devices import probe_verdict
from gpuallreduce.devices.probe_verdict import Failure, Verdict

UUIDS = ("GPU-a", "GPU-b")
VETO = Verdict(UUIDS, (Failure("GPU-a", "GPU-b", "stores do not arrive"),), elapsed_ms=1.5)


# ---- the verdict --------------------------------------------------------------------------------


def where(uuids: tuple[str, ...] = UUIDS, way: str = "peer access", driver: str = "1") -> Path:
    return probe_verdict.path_of(uuids, way=way, driver=driver)


@pytest.fixture(scope="module")
def cache_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(cache_of_module: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without a verdict, that others do not share; kernels stay in it."""
    for path in cache_of_module.glob("probe-*.json"):
        path.unlink()
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(cache_of_module))
    return cache_of_module


def test_a_verdict_names_the_first_pair_and_counts_the_others():
    names = {"GPU-a": "cuda:0", "GPU-b": "cuda:1"}
    assert Verdict(UUIDS).reason(names) is None
    reason = VETO.reason(names)
    assert reason is not None
    assert reason.endswith("cuda:0 on memory of cuda:1: stores do not arrive")
    both = Verdict(UUIDS, (*VETO.failures, Failure("GPU-b", "GPU-a", "loads are wrong")))
    assert str(both.reason(names)).endswith("stores do not arrive, and 1 more")


@pytest.mark.parametrize("verdict", [VETO, Verdict(UUIDS)])
def test_a_verdict_is_kept_for_later_processes(cache, verdict):
    assert probe_verdict.kept(where()) is None
    probe_verdict.keep(where(), verdict)
    assert probe_verdict.kept(where()) == verdict
    assert list(cache.glob("*.json")) == [where()]
    assert not list(cache.glob(".new-*"))


def test_a_verdict_holds_for_its_gpus_way_driver_and_boot_only(cache, tmp_path, monkeypatch):
    same = where()
    assert where(("GPU-b", "GPU-a", "GPU-a")) == same
    others = {where(("GPU-a", "GPU-c")), where(way="CUDA IPC"), where(driver="2")}
    (tmp_path / "boot").write_text("another\n")
    monkeypatch.setattr(probe_verdict, "BOOT_ID", tmp_path / "boot")
    others.add(where())
    assert len(others | {same}) == 5


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"gpus": []}', '{"failures": [{}]}'])
def test_a_damaged_verdict_is_none(cache, content):
    where().write_text(content)
    assert probe_verdict.kept(where()) is None


def test_chance_is_not_kept_and_what_was_fatal_is_not_so_later(cache):
    probe_verdict.keep(where(), Verdict(UUIDS, VETO.failures, is_final=False))
    assert probe_verdict.kept(where()) is None
    probe_verdict.keep(where(), Verdict(UUIDS, VETO.failures, is_fatal=True))
    assert probe_verdict.kept(where()) == Verdict(UUIDS, VETO.failures)


def test_a_cache_that_cannot_be_written_is_borne(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUALLREDUCE_CACHE", str(tmp_path / "file"))
    probe_verdict.keep(where(), VETO)
    assert probe_verdict.kept(where()) is None


# ---- GPUs of one process ------------------------------------------------------------------------


def gpus_here() -> list[Any]:
    from gpuallreduce.devices.cuda_runtime import device_count, gpu_of

    return [gpu_of(number) for number in range(device_count())]


def check_honest() -> None:
    from unittest import mock

    from gpuallreduce import reach_cuda
    from gpuallreduce.devices import cuda_probe

    gpus = gpus_here()
    reach = reach_cuda.local_reach(gpus, probing=reach_cuda.KEPT)
    assert (reach.reason, reach.note, reach.verdict) == (None, "not probed yet", None)
    first = reach_cuda.local_reach(gpus).verdict
    assert first is not None
    assert set(first.gpus) == {gpu.uuid for gpu in gpus}
    assert first.failures == ()
    with mock.patch.object(cuda_probe, "probe") as probe:
        for probing in (reach_cuda.IF_NEW, reach_cuda.KEPT):
            assert reach_cuda.local_reach(gpus[::-1], probing=probing).verdict == first
        reach_cuda.local_reach(gpus[:1] * 3)
        assert not probe.called
        probe.return_value = VETO
        with pytest.raises(KeyError):  # its GPUs are none of these
            reach_cuda.local_reach(gpus, probing=reach_cuda.AGAIN)
        assert probe.called


def test_honest_gpus_pass_once_for_all(cache):
    run_in_child(check_honest, {})


def check_pair_of_many() -> None:
    from gpuallreduce import reach_cuda

    gpus = gpus_here()
    both = reach_cuda.local_reach(gpus)
    for failure in both.verdict.failures:
        assert {failure.accessing, failure.owner} == {gpus[0].uuid, gpus[3].uuid}
    assert reach_cuda.local_reach(gpus[:3]).reason is None
    assert "cuda:0 on memory of cuda:3" in str(reach_cuda.local_reach(gpus[::3]).reason)


def test_only_gpus_of_a_lying_pair_are_accused(cache):
    run_in_child(check_pair_of_many, {}, topology="pcie4", lying_peers="3-0")


def all_reduced(devices: list[str], *, timeout: float) -> tuple[str, str]:
    """Runs an all-reduce and checks it; the transport, and the error if there was one."""
    import cupy
    import numpy as np

    import gpuallreduce as gar

    xs = []
    for rank, name in enumerate(devices):
        with cupy.cuda.Device(int(name[5:])):
            xs.append(cupy.asarray(np.arange(1000, dtype=np.float32) * (rank + 1)))
    comm = gar.Communicator(devices, timeout=timeout)
    transport = comm.plan(xs).transport
    try:
        comm.allreduce(xs)
        comm.synchronize()
    except gar.Error as error:
        return transport, type(error).__name__
    finally:
        comm.close()
    total = np.arange(1000) * sum(range(1, len(devices) + 1))
    return transport, "" if all((x.get() == total).all() for x in xs) else "wrong"


def check_lying(skip: bool) -> None:
    import cupy
    import numpy as np

    runtime = cupy.cuda.runtime
    assert runtime.deviceCanAccessPeer(0, 1)
    with cupy.cuda.Device(0):
        x = cupy.asarray(np.arange(10, dtype=np.float32))
        runtime.deviceSynchronize()  # the other GPU's streams do not wait for this copy
    with cupy.cuda.Device(1):
        y = cupy.empty_like(x)
        runtime.deviceEnablePeerAccess(0)
        y.data.copy_from_device(x.data, x.nbytes)
        runtime.deviceSynchronize()
        assert (y.get() == np.arange(10)).all()  # as every test by copies finds
    transport, error = all_reduced(["cuda:0", "cuda:1"], timeout=1.0 if skip else 30.0)
    if skip:
        assert transport.endswith("(not probed, as GPUALLREDUCE_PROBE=0 asks)")
        assert error == "Timeout"
    else:
        assert transport.startswith("pinned host memory (CUDA grants access, but a probe found: ")
        assert error == ""


@pytest.mark.parametrize("skip", [False, True], ids=["probed", "not probed"])
def test_lying_peers_are_found_where_copies_work_and_calls_would_hang(cache, monkeypatch, skip):
    if skip:
        monkeypatch.setenv("GPUALLREDUCE_PROBE", "0")
    run_in_child(check_lying, {"skip": skip}, gpus=2, lying_peers="0-1")


def check_seed() -> None:
    from gpuallreduce import reach_cuda

    assert reach_cuda.local_reach(gpus_here()).reason is None


def check_kept() -> None:
    transport, error = all_reduced(["cuda:0", "cuda:1"], timeout=30)
    assert "a probe found: cuda:0 on memory of cuda:1: kept" in transport
    assert error == ""


def test_a_kept_veto_is_heeded(cache):
    run_in_child(check_seed, {}, gpus=2)
    (path,) = cache.glob("probe-*.json")
    kept = json.loads(path.read_text())
    accessing, owner = sorted(kept["gpus"])
    kept["failures"] = [{"accessing": accessing, "owner": owner, "what": "kept"}]
    path.write_text(json.dumps(kept))
    run_in_child(check_kept, {}, gpus=2)


# ---- links that break in other ways -------------------------------------------------------------

ON_ONE = "if (rank == 0 && peer == 1) "
FROM_ONE = "pattern.phase && pattern.from == 0 && pattern.to == 1"  # phase 1: what is stored
OF_ONE = "if (args.rank == 0 && block.index() == 1) "
STORE_FLAG = "store_release(word(peer, rank, kProbeFlag), flag);"
FILL_INBOX = "fill(box(peer, rank, 0), {args.nonce, rank, peer, round, 1});"
FILL_BYTE = "to[i] = char(pattern.byte(i));"
FILL_PACK = "store_lanes<uint64_t, kWords>(to, i, pack.lanes);"
START = "if (!meet(0, args.start_ns)) return false;"
FILL_OUTBOX = "fill(box(rank, peer, 1), {args.nonce, rank, peer, round, 0});"
NAP = "for (const uint64_t start = clock_ns(); clock_ns() - start < 2500000000;) {}"
# What breaks: the text that is replaced, by what, and who is accused of what.
MUTANTS = {
    "stores are lost": (FILL_INBOX, f"if (!(rank == 0 && peer == 1)) {FILL_INBOX}", "stores arr"),
    "a flag is lost": (STORE_FLAG, f"if (!(rank == 0 && peer == 1)) {STORE_FLAG}", "do not arrive"),
    "one bit of bytes flips in one round": (
        FILL_BYTE,
        f"to[i] = char(pattern.byte(i) ^ ({FROM_ONE} && pattern.round == 7 && i == 12345));",
        "stores arrive wrong (byte 12345: ",
    ),
    "the last word of zeros is ones": (
        FILL_PACK,
        f"if ({FROM_ONE} && pattern.round == 1 && i + 1 == args.box_bytes / kPackBytes)"
        f" pack.words[kWords - 1] = ~uint64_t(0); {FILL_PACK}",
        "stores arrive wrong (byte 32760: 0xffffffffffffffff instead of 0x0)",
    ),
    "an access hangs": (FILL_OUTBOX, f"{ON_ONE}{NAP} {FILL_OUTBOX}", "loads or stores hang"),
    "a kernel does not start": (START, f"{ON_ONE}{NAP} {START}", "did not start"),
}


def check_mutant(folder: str, says: str) -> None:
    from unittest import mock

    from gpuallreduce import reach_cuda
    from gpuallreduce.devices import cuda_probe

    jit.kernels_folder = lambda: Path(folder)  # type: ignore[assignment]
    cuda_probe.LIMIT_S = cuda_probe.START_S = 1.5  # a busy machine is no fault
    gpus = gpus_here()
    with mock.patch.object(cuda_probe, "probe", wraps=cuda_probe.probe) as probe:
        verdict = reach_cuda.local_reach(gpus).verdict
    for failure in verdict.failures:
        assert (failure.accessing, failure.owner) == (gpus[0].uuid, gpus[1].uuid)
        assert says in failure.what
    assert verdict.failures
    assert probe.call_count == (1 if "wrong" in says or says == "stores arr" else 2)
    assert reach_cuda.local_reach(gpus, probing=reach_cuda.KEPT).verdict == verdict


def mutated_kernels(folder: Path, old: str, new: str) -> str:
    """A copy of the kernels with a text of the probe replaced."""
    shutil.copytree(jit.kernels_folder(), folder)
    source = folder / "probe.cuh"
    text = source.read_text()
    assert text.count(old) == 1, old
    helper = (
        "static inline bool round_is(const ProbePattern& p, uint32_t r) { return p.round == r; }"
    )
    text = text.replace("class ProbePair {", f"{helper}\nclass ProbePair {{").replace(old, new)
    source.write_text(text)
    return str(folder)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_probe_notices_a_link_on_which(cache, tmp_path, name):
    old, new, says = MUTANTS[name]
    folder = mutated_kernels(tmp_path / "kernels", old, new)
    run_in_child(check_mutant, {"folder": folder, "says": says}, gpus=3)


def check_fatal(folder: str) -> None:
    from gpuallreduce import DeviceError, reach_cuda

    jit.kernels_folder = lambda: Path(folder)  # type: ignore[assignment]
    with pytest.raises(DeviceError, match=r"CUDA is lost to this process.*start again"):
        reach_cuda.local_reach(gpus_here())


def check_after_fatal(folder: str) -> None:
    from gpuallreduce import reach_cuda

    jit.kernels_folder = lambda: Path(folder)  # type: ignore[assignment]
    assert "CUDA failed" in str(reach_cuda.local_reach(gpus_here()).reason)


def test_a_probe_that_breaks_cuda_says_so_and_the_next_process_needs_none(cache, tmp_path):
    fault = f"{OF_ONE}*reinterpret_cast<volatile uint64_t*>(uint64_t(64)) = 1; "
    old = "return block.index() == args.rank ||"
    folder = mutated_kernels(tmp_path / "kernels", old, fault + old)
    run_in_child(check_fatal, {"folder": folder}, gpus=2)
    run_in_child(check_after_fatal, {"folder": folder}, gpus=2)


# ---- a process per rank -------------------------------------------------------------------------

BODY = """
import cupy
rank = int(os.environ["GPUALLREDUCE_RANK"])
if rank == 1 and "ONE_SKIPS" in os.environ:
    os.environ["GPUALLREDUCE_PROBE"] = "0"
from gpuallreduce import reach_cuda
from gpuallreduce.devices import cuda_probe
launched, launch = [], cuda_probe.launch
def counting(*arguments):
    launched.append(1)
    return launch(*arguments)
cuda_probe.launch = counting
device = f"cuda:{rank % 2}"
comm = gar.init(device=device, timeout=30)
x = cupy.asarray(np.arange(1000, dtype=np.float32) * (rank + 1))
transport = comm.plan(x).transport
error = None
if os.environ.get("GPUALLREDUCE_PROBE") != "0" and "ONE_SKIPS" not in os.environ:
    comm.allreduce(x)
    comm.synchronize()
    assert (x.get() == np.arange(1000) * sum(range(1, comm.nranks + 1))).all()
report([transport, comm.topology.path, len(launched)])
comm.close()
"""


def joined(nranks: int, **settings: Any) -> list[Any]:
    one_skips = {"ONE_SKIPS": "1"} if settings.pop("one_skips", False) else {}
    variables = {**environment(topology="pcie4", gpus=2, **settings), **one_skips}
    return [rank.reports[0] for rank in run_job(nranks, BODY, **variables)]


def test_processes_probe_once_and_ranks_on_one_gpu_are_stood_for_by_the_first(cache):
    assert joined(3) == [["CUDA IPC", "pcie", 1]] * 2 + [["CUDA IPC", "pcie", 0]]
    assert joined(3) == [["CUDA IPC", "pcie", 0]] * 3


def test_processes_agree_on_a_veto_and_go_through_host_memory(cache):
    found = joined(3, lying_peers="0-1")
    assert len({transport for transport, *_ in found}) == 1
    assert "a probe found: rank 0 on memory of rank 1: loads are wrong" in found[0][0]
    assert {path for _, path, _ in found} == {"host memory"}
    again = joined(3, lying_peers="0-1")
    assert [launched for *_, launched in again] == [0] * 3
    assert {path for _, path, _ in again} == {"host memory"}


def test_one_rank_that_asks_to_skip_is_enough(cache):
    words = "CUDA IPC (not probed, as GPUALLREDUCE_PROBE=0 asks)"
    assert joined(2, one_skips=True) == [[words, "pcie", 0]] * 2
