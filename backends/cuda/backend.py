"""The entry point `equipoise.accelerators: cuda`."""

from equipoise.backends.cuda import native
from equipoise.backends.cuda.accelerator import CudaAccelerator
from equipoise.hal.capabilities import Capabilities, Probe, Unavailable
from equipoise.hal.errors import BackendUnavailable
from equipoise.hal.stream import Role


class CudaBackend:
    """NVIDIA GPUs through torch.cuda."""

    name = "cuda"
    communicator = "nccl"

    @property
    def capabilities(self) -> Capabilities:
        """What torch and cuda-bindings that are installed here can do.

        A wait for a value is done by the device's front end: it holds up its stream, takes no
        multiprocessor, and leaves the copy engines alone. But it also holds up what stands behind
        it in the same queue of the device: copies are independent only where streams share none.
        """
        locks = not native.stream_memory()
        return Capabilities(
            streams=len(Role),
            stream_lock=locks,
            copy_independent_of_launch=locks and not native.shared_queues(),
            graph_capture=True,
            pinned_memory=True,
        )

    def probe(self) -> Probe:
        """Whether a CUDA build of torch is here, and a device; in one line why not."""
        return native.probe()

    def devices(self) -> int:
        """How many devices can be opened."""
        return 0 if isinstance(self.probe(), Unavailable) else native.RUNTIME.devices()

    def open(self, index: int) -> CudaAccelerator:
        """Open that device, and make it the calling thread's."""
        answer = self.probe()
        if isinstance(answer, Unavailable):
            raise BackendUnavailable(answer.reason)
        found = native.RUNTIME.devices()
        if not 0 <= index < found:
            raise BackendUnavailable(f"there are {found} device(s), from 0: no device {index}")
        native.RUNTIME.choose(index)
        return CudaAccelerator(index)
