"""The emulated GPUs find what a GPU would not forgive, and let pass what it allows.

Memory, kernels, peers and processes here; the order of work in test_emulated_streams.

Each body runs in a process of its own, with the settings above it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from emulated_gpu.activate import environment
from emulated_gpu.child import in_child
from emulated_gpu.handmade import LIMIT_NS, Image, call, compile_image, current, read, status, write

pytest.importorskip("cupy_backends")
pytest.importorskip("cuda.bindings.driver")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_image(tmp_path_factory.mktemp("image"))


@in_child()
def test_fresh_memory_is_not_zero_and_keeps_what_is_copied() -> None:
    current(0)
    address = call("cuMemAlloc", 1 << 21)
    assert read(address, 2) == [0xCBCBCBCBCBCBCBCB] * 2
    write(int(address) + 8, 1, 2, 3)
    assert read(int(address) + 8, 3) == [1, 2, 3]
    call("cuMemsetD8", address, 7, 1 << 21)
    assert read(int(address) + (1 << 21) - 8) == [0x0707070707070707]


@in_child()
def test_every_block_runs_once_and_knows_the_grid(image: str) -> None:
    current(3)
    kernels, counts = Image(image), call("cuMemAlloc", 8 * 300)
    call("cuMemsetD8", counts, 0, 8 * 300)
    assert kernels.launch("count_blocks", counts, grid=300) == "SUCCESS"
    assert read(counts, 300) == [300] * 300


@in_child()
@pytest.mark.parametrize(
    ("count", "offset"),
    [(1 << 20, 1 << 20), (1 << 20, (1 << 20) + 4088), (1 << 20, -8), (1000, 1024)],
)
def test_a_kernel_outside_of_its_allocation_fails_its_context_only(
    image: str, count: int, offset: int
) -> None:
    current(1)
    other = call("cuMemAlloc", 8)
    current(0)
    kernels = Image(image)
    _, address, _ = (call("cuMemAlloc", count) for _ in range(3))  # with neighbours on both sides
    assert kernels.launch("store", address, count - 8, 5) == "SUCCESS"
    call("cuCtxSynchronize")
    assert kernels.launch("store", address, offset, 5) == "SUCCESS"
    assert status("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
    assert status("cuMemAlloc", 8) == "ILLEGAL_ADDRESS"
    assert status("cuStreamCreate", 0) == "ILLEGAL_ADDRESS"
    assert kernels.launch("store", address, 0, 5) == "ILLEGAL_ADDRESS"
    current(1)
    write(other, 4)
    assert read(other) == [4]
    call("cuDevicePrimaryCtxReset", 0)
    current(0)
    assert status("cuMemAlloc", 8) == "SUCCESS"


@in_child()
@pytest.mark.parametrize("kernel", ["store", "store_through"])
def test_freed_memory_is_out_of_reach(image: str, kernel: str) -> None:
    current(0)
    kernels, gone, table = Image(image), call("cuMemAlloc", 64), call("cuMemAlloc", 8)
    write(table, int(gone))
    call("cuMemFree", gone)
    assert status("cuMemFree", gone) == "INVALID_VALUE"
    assert status("cuMemsetD8", gone, 0, 8) == "INVALID_VALUE"
    arguments = (gone, 0, 1) if kernel == "store" else (table, 1)
    assert kernels.launch(kernel, *arguments) == "SUCCESS"
    assert status("cuCtxSynchronize") == "ILLEGAL_ADDRESS"


@in_child()
def test_copies_and_fills_are_checked_at_the_call() -> None:
    current(0)
    address, host = call("cuMemAlloc", 1000), bytearray(2000)
    pageable = ctypes.addressof((ctypes.c_char * 2000).from_buffer(host))
    assert status("cuMemcpyHtoD", address, host, 1001) == "INVALID_VALUE"
    assert status("cuMemcpyHtoD", int(address) + 1, host, 1000) == "INVALID_VALUE"
    assert status("cuMemcpyDtoH", host, int(address) - 1, 8) == "INVALID_VALUE"
    assert status("cuMemcpyDtoD", address, pageable, 8) == "INVALID_VALUE"
    assert status("cuMemcpyHtoD", address, int(address) + 8, 8) == "INVALID_VALUE"
    assert status("cuMemcpy", address, pageable, 8) == "SUCCESS"
    assert status("cuMemsetD8", pageable, 0, 8) == "INVALID_VALUE"
    assert status("cuMemsetD8", address, 0, 1001) == "INVALID_VALUE"
    assert status("cuMemsetD32", int(address) + 2, 0, 8) == "INVALID_VALUE"
    assert status("cuMemHostGetDevicePointer", pageable, 0) == "INVALID_VALUE"
    assert status("cuMemAlloc", 0) == "INVALID_VALUE"


@in_child()
def test_memory_of_a_device_ends_at_80_gib() -> None:
    current(0)
    assert status("cuMemAlloc", (80 << 30) + 1) == "OUT_OF_MEMORY"
    big = call("cuMemAlloc", 79 << 30)
    assert status("cuMemAlloc", 2 << 30) == "OUT_OF_MEMORY"
    assert call("cuMemGetInfo") == (1 << 30, 80 << 30)
    call("cuMemFree", big)
    assert status("cuMemAlloc", 2 << 30) == "SUCCESS"


@in_child()
def test_a_kernel_reaches_a_peer_only_with_access(image: str) -> None:
    peer = current(1)
    address = call("cuMemAlloc", 64)
    current(0)
    kernels = Image(image)
    assert status("cuCtxDisablePeerAccess", peer) == "PEER_ACCESS_NOT_ENABLED"
    call("cuCtxEnablePeerAccess", peer, 0)
    assert status("cuCtxEnablePeerAccess", peer, 0) == "PEER_ACCESS_ALREADY_ENABLED"
    assert kernels.launch("store", address, 0, 9) == "SUCCESS"
    assert read(address) == [9]
    call("cuCtxDisablePeerAccess", peer)
    assert read(address) == [9], "copies need no peer access"
    assert kernels.launch("store", address, 0, 9) == "SUCCESS"
    assert status("cuCtxSynchronize") == "ILLEGAL_ADDRESS"


@in_child(topology="islands2")
def test_peer_access_follows_the_topology() -> None:
    contexts = [current(device) for device in range(4)]
    call("cuCtxSetCurrent", contexts[1])
    reachable = [call("cuDeviceCanAccessPeer", 1, peer) for peer in range(4)]
    assert reachable == [1, 0, 0, 0]
    assert status("cuCtxEnablePeerAccess", contexts[0], 0) == "SUCCESS"
    assert status("cuCtxEnablePeerAccess", contexts[2], 0) == "PEER_ACCESS_UNSUPPORTED"


@in_child()
@pytest.mark.parametrize("registered", [True, False])
def test_host_memory_is_reachable_while_it_is_pinned(image: str, registered: bool) -> None:
    current(0)
    host = bytearray(64)
    if registered:
        address = ctypes.addressof((ctypes.c_char * 64).from_buffer(host))
        call("cuMemHostRegister", address, 64, 0)
        assert status("cuMemHostRegister", address + 8, 8, 0) == "HOST_MEMORY_ALREADY_REGISTERED"
    else:
        address = call("cuMemHostAlloc", 64, 0)
    current(5)
    kernels = Image(image)
    assert kernels.launch("store", address, 8, 6) == "SUCCESS"
    call("cuCtxSynchronize")
    assert ctypes.c_uint64.from_address(address + 8).value == 6
    call("cuMemHostUnregister" if registered else "cuMemFreeHost", address)
    assert kernels.launch("store", address, 8, 7) == "SUCCESS"
    assert status("cuCtxSynchronize") == "ILLEGAL_ADDRESS"


@in_child()
def test_pool_memory_is_its_devices_own_until_access_is_granted(image: str) -> None:
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute
    peer = current(1)
    address = call("cuMemAllocAsync", 64, 0)
    pool = call("cuDeviceGetDefaultMemPool", 1)
    write(address, 3)
    handle = attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
    assert int(call("cuPointerGetAttribute", handle, address)) == int(pool)
    exportable = attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    assert not call("cuPointerGetAttribute", exportable, address)
    assert status("cuIpcGetMemHandle", address) == "INVALID_VALUE"
    current(0)
    call("cuCtxEnablePeerAccess", peer, 0)
    host = bytearray(8)
    assert status("cuMemcpyDtoH", host, address, 8) == "INVALID_VALUE"
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call("cuMemPoolSetAccess", pool, [access], 1)
    kernels = Image(image)
    assert kernels.launch("store", address, 0, 8) == "SUCCESS"
    assert read(address) == [8]
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    call("cuMemPoolSetAccess", pool, [access], 1)
    assert kernels.launch("store", address, 0, 8) == "SUCCESS"
    assert status("cuCtxSynchronize") == "ILLEGAL_ADDRESS"


@in_child(sms=2)
@pytest.mark.parametrize(
    ("grids", "block", "fits"),
    [
        ([4], 1024, True),
        ([5], 1024, False),
        ([8], 512, True),
        ([9], 512, False),
        ([4, 4], 512, True),
        ([4, 5], 512, False),
        ([2, 4], 1024, False),
    ],
)
def test_blocks_meet_only_if_the_multiprocessors_hold_them_all(
    image: str, grids: list[int], block: int, fits: bool
) -> None:
    current(0)
    kernels, words = Image(image), call("cuMemAlloc", 16)
    write(words, 0, 0)
    limit_ns = LIMIT_NS if fits else 100_000_000
    for grid in grids:
        stream = call("cuStreamCreate", 1)
        arguments = (words, sum(grids), limit_ns, int(words) + 8)
        assert kernels.launch("meet", *arguments, grid=grid, block=block, stream=stream) == (
            "SUCCESS"
        )
    call("cuCtxSynchronize")
    met, missed = read(words, 2)
    assert met == sum(grids)
    assert (missed == 0) == fits


@in_child(sms=2)
def test_a_cooperative_launch_that_does_not_fit_is_refused(image: str) -> None:
    current(0)
    kernels = Image(image)
    function = call("cuModuleGetFunction", kernels.module, b"count_blocks")
    assert call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, 512, 0) == 4
    shape = (9, 1, 1, 512, 1, 1, 0, 0, 0)
    assert status("cuLaunchCooperativeKernel", function, *shape) == "COOPERATIVE_LAUNCH_TOO_LARGE"


@in_child()
def test_kernels_of_eight_devices_meet(image: str) -> None:
    contexts = [current(device) for device in range(8)]
    words = call("cuMemHostAlloc", 16, 0)
    ctypes.memset(int(words), 0, 16)
    for context in contexts:
        call("cuCtxSetCurrent", context)
        arguments = (words, 8 * 16, LIMIT_NS, int(words) + 8)
        assert Image(image).launch("meet", *arguments, grid=16) == "SUCCESS"
    for context in contexts:
        call("cuCtxSetCurrent", context)
        call("cuCtxSynchronize")
    assert ctypes.c_uint64.from_address(int(words)).value == 8 * 16
    assert ctypes.c_uint64.from_address(int(words) + 8).value == 0


@in_child()
def test_what_is_no_image_for_this_machine_is_refused(image: str) -> None:
    current(0)
    content = Path(image).read_bytes()
    cuda_machine = content[:18] + (190).to_bytes(2, "little") + content[20:]
    for other in (
        cuda_machine,
        b".version 8.0\n.target sm_90\n\0",
        b"\x50\xed\x55\xba" + bytes(60),
    ):
        assert status("cuModuleLoadData", other) == "NO_BINARY_FOR_GPU"
    module = call("cuModuleLoadData", content)
    assert call("cuModuleGetFunctionCount", module) == 7
    assert status("cuModuleGetFunction", module, b"no_such") == "NOT_FOUND"
    assert status("cuModuleGetGlobal", module, b"no_such") == "NOT_FOUND"
    call("cuModuleUnload", module)
    assert status("cuModuleGetFunction", module, b"meet") == "INVALID_HANDLE"


OTHER_SOURCE = """
extern "C" const unsigned other_params_bytes = 0;
extern "C" int other(const void*, unsigned, unsigned) { return 0; }
"""


@in_child()
def test_images_are_told_apart_however_many_are_loaded(image: str) -> None:
    current(0)
    with tempfile.TemporaryDirectory() as folder:
        contents = [Path(image).read_bytes()]
        contents.append(Path(compile_image(Path(folder), OTHER_SOURCE)).read_bytes())
    modules = [call("cuModuleLoadData", contents[i % 2]) for i in range(6)]
    for i, module in enumerate(modules):
        found = [status("cuModuleGetFunction", module, name) for name in (b"meet", b"other")]
        assert found[i % 2] == "SUCCESS"
        assert found[1 - i % 2] == "NOT_FOUND"


@in_child(visible="3,GPU-00000001,9,0")
def test_cuda_visible_devices_chooses_and_orders() -> None:
    current(0)
    assert call("cuDeviceGetCount") == 2, "the list ends at the first entry that is no GPU"
    buses = [call("cuDeviceGetPCIBusId", 16, device)[:12] for device in range(2)]
    assert buses == [b"0000:13:00.0", b"0000:11:00.0"]
    assert int(call("cuDeviceGetByPCIBusId", b"0000:11:00.0")) == 1
    assert status("cuDeviceGetByPCIBusId", b"0000:10:00.0") == "INVALID_DEVICE"


EXPORTER = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from emulated_gpu.handmade import call, current, read, write
current(0)
address = call("cuMemAlloc", 1000)
write(address, 11, 12)
gone = call("cuMemAlloc", 8)
handles = [call("cuIpcGetMemHandle", int(address) + 8), call("cuIpcGetMemHandle", gone)]
call("cuMemFree", gone)
print(*(ctypes.string_at(handle.getPtr(), 64).hex() for handle in handles), flush=True)
sys.stdin.readline()
print(read(address, 2), flush=True)
"""


class Exporter:
    """Another process, whose first device exports memory."""

    def __init__(self, visible: str) -> None:
        from cuda.bindings import driver

        self.process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, str(HERE)],
            env=environment(visible=visible),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.handles = []
        for text in self.process.stdout.readline().split():
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
            self.handles.append(handle)

    def end(self) -> str:
        return self.process.communicate("\n", timeout=30)[0].strip()


@in_child(visible="0,2")
@pytest.mark.parametrize("exported", ["5,1", "2"])
def test_processes_with_other_visible_devices_share_memory(image: str, exported: str) -> None:
    current(1)
    exporter = Exporter(exported)
    kept, gone = exporter.handles
    assert status("cuIpcOpenMemHandle", kept, 0) == "INVALID_VALUE", "the flag is required"
    assert status("cuIpcOpenMemHandle", gone, 1) == "INVALID_VALUE", "it was freed"
    address = call("cuIpcOpenMemHandle", kept, 1)
    assert int(call("cuIpcOpenMemHandle", kept, 1)) == int(address)
    assert read(address, 2) == [11, 12], "a handle names the whole allocation"
    assert status("cuMemcpyDtoH", bytearray(1001), address, 1001) == "INVALID_VALUE"
    kernels = Image(image)
    assert kernels.launch("store", address, 8, 13) == "SUCCESS"
    call("cuCtxSynchronize")
    assert exporter.end() == "[11, 13]"
    call("cuIpcCloseMemHandle", address)
    assert read(address, 2) == [11, 13], "it was opened twice"
    call("cuIpcCloseMemHandle", address)
    assert status("cuIpcCloseMemHandle", address) == "INVALID_VALUE"
    assert status("cuMemcpyDtoH", bytearray(8), address, 8) == "INVALID_VALUE"
    assert status("cuIpcOpenMemHandle", kept, 1) == "INVALID_VALUE", "its process has ended"


@in_child(visible="1", topology="islands2")
def test_memory_of_a_device_out_of_reach_cannot_be_opened() -> None:
    current(0)
    exporter = Exporter("3")
    assert status("cuIpcOpenMemHandle", exporter.handles[0], 1) == "PEER_ACCESS_UNSUPPORTED"
    exporter.end()


@in_child()
def test_a_process_cannot_open_its_own_handle() -> None:
    current(0)
    handle = call("cuIpcGetMemHandle", call("cuMemAlloc", 8))
    assert status("cuIpcOpenMemHandle", handle, 1) == "INVALID_CONTEXT"
    managed = call("cuMemAllocManaged", 8, 1)
    assert status("cuIpcGetMemHandle", managed) == "INVALID_VALUE"


@in_child(ipc=False)
def test_ipc_can_be_refused() -> None:
    current(0)
    assert status("cuIpcGetMemHandle", call("cuMemAlloc", 8)) == "NOT_SUPPORTED"


@in_child()
def test_a_forked_child_has_no_driver() -> None:
    current(0)
    child = os.fork()
    if child == 0:
        refused = [status("cuInit", 0), status("cuMemAlloc", 8), status("cuCtxSynchronize")]
        os._exit(0 if refused == ["NOT_INITIALIZED"] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert status("cuMemAlloc", 8) == "SUCCESS"


@in_child()
def test_a_kernel_that_runs_does_not_keep_the_process_from_ending(image: str) -> None:
    current(0)
    kernels, word = Image(image), call("cuMemAlloc", 8)
    write(word, 0)
    assert kernels.launch("wait_for", word, 1, 3_600_000_000_000, grid=4) == "SUCCESS"


@in_child()
def test_entry_points_are_found_by_name_and_version() -> None:
    library = ctypes.CDLL("libcuda.so.1")

    def find(name: bytes, version: int) -> tuple[int, int]:
        address, found = ctypes.c_void_p(), ctypes.c_int()
        code = library.cuGetProcAddress_v2(
            name, ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(found)
        )
        assert (code == 0) == (address.value is not None)
        return code, found.value

    assert find(b"cuMemAlloc", 13000) == (0, 0)
    assert find(b"cuStreamGetCaptureInfo", 12030) == (0, 0)
    assert find(b"cuTexRefCreate", 13000) == (500, 1)
    assert find(b"cuMemAlloc", 99000) == (500, 2)
