// Allocation and copies.

#include "../core/memory.h"

#include <cstring>

#include "../core/capture.h"
#include "../core/engine.h"
#include "../core/stream.h"
#include "api.h"

using namespace npusim;

namespace {

// Numbers of aclrtMemcpyKind (interface facts).
enum Kind : int { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };

bool from_device(int kind) { return kind == kDeviceToHost || kind == kDeviceToDevice; }
bool to_device(int kind) { return kind == kHostToDevice || kind == kDeviceToDevice; }

void check_side(const char* side, const void* pointer, bool device, size_t bytes) {
  if (bytes == 0) return;
  if ((place_of(pointer) == Place::kDevice) != device) {
    const std::string wrong = text("the %s of a copy is %s device memory, and its kind says "
                                   "otherwise", side, device ? "no" : "");
    fault(wrong);
    throw Failure(kInvalidParam, wrong);
  }
  reach(pointer, bytes, side);
}

void check_copy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  if (kind < kHostToHost || kind > kDefault) {
    fault(text("a copy of kind %d", kind));
    throw Failure(kInvalidParam, "an unknown kind of copy");
  }
  if (bytes > room) {
    fault(text("a copy of %zu bytes where there is room for %zu", bytes, room));
    throw Failure(kInvalidParam, "a copy beyond its target");
  }
  const bool free = kind == kDefault;
  check_side("target", to, free ? place_of(to) == Place::kDevice : to_device(kind), bytes);
  check_side("source", from, free ? place_of(from) == Place::kDevice : from_device(kind), bytes);
}

// The runtime makes an asynchronous copy with pageable memory a blocking one; a capture of the
// stream itself cannot hold it at all.
void forbid_pageable(const void* to, const void* from, void* stream) {
  if (place_of(to) != Place::kPageable && place_of(from) != Place::kPageable) return;
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  const Stream* const on = engine.find(stream);
  if (on != nullptr && on->capture != nullptr) {
    throw Failure(kStreamCaptured, "a copy with pageable memory in a capture");
  }
  if (unsafe_now()) throw Failure(kCaptureMode, "a copy with pageable memory during a capture");
}

void check_submitted(int code) {
  if (code != kOk) throw Failure(code, recent_error());
}

}  // namespace

NPUSIM_API int aclrtMalloc(void** pointer, size_t bytes, int) {
  return guarded("aclrtMalloc", [=] { *pointer = device_malloc(current_device(), bytes); });
}

NPUSIM_API int aclrtMallocAlign32(void** pointer, size_t bytes, int policy) {
  return aclrtMalloc(pointer, bytes, policy);
}

NPUSIM_API int aclrtFree(void* pointer) {
  return guarded("aclrtFree", [=] { device_free(pointer); });
}

NPUSIM_API int aclrtMallocHost(void** pointer, size_t bytes) {
  return guarded("aclrtMallocHost", [=] { *pointer = pinned_malloc(bytes); });
}

NPUSIM_API int aclrtFreeHost(void* pointer) {
  return guarded("aclrtFreeHost", [=] { pinned_free(pointer); });
}

// As the interface lays it out: where it is, of which device, and a size of pages.
struct PointerAttributes {
  uint32_t id;
  int type;  // 0 host, 1 device, 2 not registered
  uint32_t page_size;
  uint32_t reserved[4];
};

NPUSIM_API int aclrtPointerGetAttributes(const void* pointer, PointerAttributes* out) {
  return guarded("aclrtPointerGetAttributes", [=] {
    memset(out, 0, sizeof(*out));
    const int device = device_of(pointer);
    if (device >= 0) {
      out->id = static_cast<uint32_t>(device);
      out->type = 1;
    } else {
      out->type = place_of(pointer) == Place::kPinned ? 0 : 2;
    }
    out->page_size = 4096;
  });
}

// Blocks the host and is ordered behind no stream: torch_npu synchronises the stream itself first.
NPUSIM_API int aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  return guarded("aclrtMemcpy", [=] {
    forbid_unsafe("aclrtMemcpy");
    check_copy(to, room, from, bytes, kind);
    if (bytes > 0) memmove(reach(to, bytes, "target"), reach(from, bytes, "source"), bytes);
  });
}

NPUSIM_API int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind,
                                void* stream) {
  return guarded("aclrtMemcpyAsync", [=] {
    check_copy(to, room, from, bytes, kind);
    if (bytes == 0) return;
    forbid_pageable(to, from, stream);
    check_submitted(submit(stream, "copy", copy_bytes(to, from, bytes)));
  });
}

NPUSIM_API int aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes,
                                             int kind, void* stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

NPUSIM_API int aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  return guarded("aclrtMemset", [=] {
    forbid_unsafe("aclrtMemset");
    check_copy(to, room, to, bytes, kDefault);
    if (bytes > 0) memset(reach(to, bytes, "memset"), value, bytes);
  });
}

NPUSIM_API int aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, void* stream) {
  return guarded("aclrtMemsetAsync", [=] {
    check_copy(to, room, to, bytes, kDefault);
    if (bytes == 0) return;
    check_submitted(submit(stream, "memset", at_once([=] {
                             memset(reach(to, bytes, "memset"), value, bytes);
                           })));
  });
}
