// Streams, and values in memory that streams wait for.

#include "../core/engine.h"
#include "../core/memory.h"
#include "api.h"

using namespace npusim;

namespace {

int synchronize_stream(void* handle, int64_t milliseconds) {
  return guarded("aclrtSynchronizeStream", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    Stream* const stream = engine.get(handle);
    if (stream->capture != nullptr) {
      throw Failure(kStreamCaptured, "a stream is synchronised while it is captured");
    }
    const uint64_t upto = stream->issued;
    engine.demand(stream, upto);
    const auto over = [=] { return stream->ended >= upto; };
    const bool ready = engine.wait(held, over, milliseconds);
    if (stream->error != 0) throw Failure(stream->error, stream->why);
    if (!ready) throw Failure(kStreamTimeout, text("stream %d was not drained", stream->id));
  });
}

// How the value in memory is compared with the one that is waited for (interface facts).
bool fits(uint64_t found, uint64_t wanted, uint32_t how) {
  switch (how) {
    case 0:
      return static_cast<int64_t>(found - wanted) >= 0;
    case 1:
      return found == wanted;
    case 2:
      return (found & wanted) != 0;
    default:
      return ~(found | wanted) != 0;
  }
}

uint64_t* wide_word(void* pointer) {
  return reinterpret_cast<uint64_t*>(host(pointer, sizeof(uint64_t), "a value of a stream"));
}

}  // namespace

NPUSIM_API int aclrtCreateStreamWithConfig(void** out, uint32_t, uint32_t) {
  return guarded("aclrtCreateStreamWithConfig", [=] {
    const int device = current_device();
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    *out = engine.add(device);
  });
}

NPUSIM_API int aclrtCreateStream(void** out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

NPUSIM_API int aclrtDestroyStream(void* handle) {
  return guarded("aclrtDestroyStream", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    engine.remove(engine.get(handle));
  });
}

NPUSIM_API int aclrtDestroyStreamForce(void* handle) { return aclrtDestroyStream(handle); }

NPUSIM_API int aclrtSynchronizeStream(void* stream) { return synchronize_stream(stream, -1); }

NPUSIM_API int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t milliseconds) {
  return synchronize_stream(stream, milliseconds);
}

NPUSIM_API int aclrtStreamQuery(void* handle, int* status) {
  return guarded("aclrtStreamQuery", [=] {
    Engine& engine = Engine::get();
    {
      Lock held = engine.lock();
      Stream* const stream = engine.get(handle);
      if (stream->capture != nullptr) throw Failure(kStreamCaptured, "a captured stream is asked");
      if (stream->error != 0) throw Failure(stream->error, stream->why);
      *status = engine.drained(stream) ? 0 : 1;
    }
    if (*status != 0) engine.asked();
  });
}

NPUSIM_API int aclrtStreamGetId(void* handle, int32_t* id) {
  return guarded("aclrtStreamGetId", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    *id = engine.get(handle)->id;
  });
}

// Attributes choose how a failure is treated and what a profiler is told: one behaviour here.
NPUSIM_API int aclrtSetStreamAttribute(void*, int, void*) { return kOk; }

NPUSIM_API int aclrtSetStreamFailureMode(void*, uint64_t) { return kOk; }

NPUSIM_API int aclrtValueWrite(void* pointer, uint64_t value, uint32_t, void* stream) {
  return guarded("aclrtValueWrite", [=] {
    wide_word(pointer);
    const int code = submit(stream, text("value write %llu", static_cast<unsigned long long>(value)),
                            at_once([=] { __atomic_store_n(wide_word(pointer), value, __ATOMIC_RELEASE); }));
    if (code != kOk) throw Failure(code, recent_error());
  });
}

NPUSIM_API int aclrtValueWait(void* pointer, uint64_t value, uint32_t how, void* stream) {
  return guarded("aclrtValueWait", [=] {
    wide_word(pointer);
    const int code = submit(stream, text("value wait %llu", static_cast<unsigned long long>(value)),
                            [=] {
                              const uint64_t found = __atomic_load_n(wide_word(pointer), __ATOMIC_ACQUIRE);
                              return fits(found, value, how) ? Turn::kDone : Turn::kBlocked;
                            });
    if (code != kOk) throw Failure(code, recent_error());
  });
}
