#include "stream.h"

#include <cstring>

#include "capture.h"
#include "engine.h"
#include "errors.h"
#include "fault.h"
#include "memory.h"

namespace npusim {
namespace {

thread_local int t_device = -1;

}  // namespace

void choose_device(int device) { t_device = device; }

int current_device() {
  if (t_device < 0) throw Failure(kNoContext, "the calling thread has chosen no device");
  return t_device;
}

int submit(void* handle, const std::string& what, Body body) try {
  Engine& engine = Engine::get();
  {
    Lock held = engine.lock();
    Stream* const stream = engine.find(handle);
    if (stream == nullptr) return kUnknownStream;
    if (stream->capture != nullptr) {
      stream->capture->add(stream, {what, std::move(body)});
      return kOk;
    }
    check_default(stream);
    engine.put(stream, {what, std::move(body)});
  }
  engine.called();
  return kOk;
} catch (const Failure& failure) {
  remember_error(failure.what());
  return failure.code;
}

void nudge() {
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  engine.progress();
}

Body copy_bytes(void* to, const void* from, size_t bytes) {
  size_t copied = 0;
  return [=]() mutable {
    uint8_t* const target = reach(to, bytes, "the target of a copy");
    const uint8_t* const source = reach(from, bytes, "the source of a copy");
    const bool torn = config().mode != Mode::kEager && copied == 0 && bytes > 1;
    const size_t part = torn ? bytes / 2 : bytes - copied;
    memmove(target + copied, source + copied, part);
    copied += part;
    return copied < bytes ? Turn::kAgain : Turn::kDone;
  };
}

}  // namespace npusim
