// Devices and contexts. A context is its device's number, and every thread chooses for itself.

#include <cstring>

#include "../core/config.h"
#include "../core/engine.h"
#include "../core/memory.h"
#include "api.h"

using namespace npusim;

namespace npusim {

void check_device(int device) {
  if (device < 0 || device >= config().devices) {
    throw Failure(kInvalidDevice, text("device %d of %d", device, config().devices));
  }
}

}  // namespace npusim

namespace {

// A handle that is not null for device 0.
void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }

int device_in(void* context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
}

int synchronize_device(int64_t milliseconds) {
  return guarded("aclrtSynchronizeDevice", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    const auto streams = engine.on(current_device());
    for (const Stream* stream : streams) {  // whatever the mode of the capture
      if (stream->capture == nullptr) continue;
      throw Failure(kStreamCaptured, "a device is synchronised while a stream of it is captured");
    }
    for (Stream* stream : streams) engine.demand(stream, stream->issued);
    for (Stream* stream : streams) {
      const uint64_t upto = stream->issued;
      const auto over = [=] { return stream->ended >= upto; };
      if (!engine.wait(held, over, milliseconds)) throw Failure(kStreamTimeout, "device");
      if (stream->error != 0) throw Failure(stream->error, stream->why);
    }
  });
}

}  // namespace

NPUSIM_API int aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(config().devices);
  return kOk;
}

NPUSIM_API int aclrtSetDevice(int32_t device) {
  return guarded("aclrtSetDevice", [=] {
    check_device(device);
    choose_device(device);
  });
}

NPUSIM_API int aclrtGetDevice(int32_t* device) {
  return guarded("aclrtGetDevice", [=] { *device = current_device(); });
}

// Streams and memory stay: the program is about to end (torch_npu resets at exit only).
NPUSIM_API int aclrtResetDevice(int32_t) { return kOk; }

NPUSIM_API int aclrtSetCurrentContext(void* context) { return aclrtSetDevice(device_in(context)); }

NPUSIM_API int aclrtGetCurrentContext(void** context) {
  return guarded("aclrtGetCurrentContext", [=] { *context = context_of(current_device()); });
}

NPUSIM_API int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return kOk;
}

NPUSIM_API int aclrtSynchronizeDevice() { return synchronize_device(-1); }

NPUSIM_API int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  return synchronize_device(milliseconds);
}

NPUSIM_API int aclrtDeviceCanAccessPeer(int32_t* able, int32_t device, int32_t peer) {
  return guarded("aclrtDeviceCanAccessPeer", [=] {
    check_device(device);
    check_device(peer);
    *able = 1;
  });
}

NPUSIM_API int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  return guarded("aclrtDeviceEnablePeerAccess", [=] { check_device(peer); });
}

NPUSIM_API int aclrtGetMemInfo(int, size_t* free, size_t* total) {
  return guarded("aclrtGetMemInfo", [=] {
    *free = free_memory(current_device());
    *total = total_memory();
  });
}

// Numbers of cores and the size of the cache: any plausible ones, nothing here depends on them.
NPUSIM_API int aclGetDeviceCapability(uint32_t, int kind, int64_t* value) {
  constexpr int64_t kCores = 20;
  constexpr int64_t kCache = 192 << 20;
  *value = kind == 2 ? kCache : kCores;
  return kOk;
}
