#include "event.h"

#include "capture.h"
#include "errors.h"
#include "fault.h"

namespace npusim {
namespace {

// Throws when the recording cannot come any more.
void check(const Recording& recording) {
  if (recording.reached) return;
  if (recording.stream != nullptr && recording.stream->error != 0) {
    throw Failure(recording.stream->error, recording.stream->why);
  }
}

void check_outside_capture(const Recording& recording) {
  if (recording.stream == nullptr) {
    throw Failure(kEventCaptured, "an event that was recorded in a capture is looked at");
  }
}

Body waiting(std::shared_ptr<Recording> recording) {
  return [recording] {
    if (recording->reached) return Turn::kDone;
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    // A recording on a stream that failed never comes: what waits for it must not run.
    check(*recording);
    engine.demand(recording->stream, recording->place);
    return Turn::kBlocked;
  };
}

Task reaching(const std::shared_ptr<Recording>& recording) {
  return {"event record", at_once([recording] {
            recording->at = now();
            recording->reached = true;
          })};
}

Stream* known(Engine& engine, void* handle) {
  Stream* const stream = engine.find(handle);
  if (stream == nullptr) throw Failure(kUnknownStream, "no such stream");
  check_default(stream);
  return stream;
}

void put(Engine& engine, Stream* stream, Task task) {
  if (stream->capture != nullptr) {
    stream->capture->add(stream, std::move(task));
  } else {
    engine.put(stream, std::move(task));
  }
}

// A wait for an event that was recorded in a capture makes the stream a part of that capture.
void join(const Spot& spot, Stream* stream) {
  const std::shared_ptr<Capture> capture = spot.capture.lock();
  if (capture == nullptr) {
    fault("a stream waits for an event that was recorded in a capture which has ended");
    throw Failure(kEventCaptured, "an event of a capture that has ended");
  }
  if (stream == Engine::get().standard(stream->device)) {
    throw Failure(kCaptureImplicit, "the default stream waits for an event of a capture");
  }
  (stream->capture == nullptr ? capture.get() : stream->capture)->join(stream, spot);
}

void set_external(Engine& engine, Event& event, Stream* stream) {
  auto full = event.full;
  put(engine, stream, {"external event record", at_once([full] { full->store(1); })});
}

}  // namespace

void record(Event& event, void* handle) {
  Engine& engine = Engine::get();
  {
    Lock held = engine.lock();
    Stream* const stream = known(engine, handle);
    if (event.flags & kEventExternal) {
      set_external(engine, event, stream);
    } else {
      auto recording = std::make_shared<Recording>();
      if (stream->capture != nullptr) {
        recording->spot = stream->capture->spot(stream);
      } else {
        recording->stream = stream;
        recording->place = engine.put(stream, reaching(recording));
      }
      event.latest = recording;
    }
  }
  engine.called();
}

void wait(Event& event, void* handle) {
  Engine& engine = Engine::get();
  {
    Lock held = engine.lock();
    Stream* const stream = known(engine, handle);
    if (event.flags & kEventExternal) {
      auto full = event.full;
      put(engine, stream, {"external event wait", [full] {
             int set = 1;
             return full->compare_exchange_strong(set, 0) ? Turn::kDone : Turn::kBlocked;
           }});
    } else if (event.latest == nullptr) {
      fault("a stream waits for an event that was never recorded");
      throw Failure(kInvalidParam, "a wait for an event that was never recorded");
    } else if (event.latest->stream == nullptr) {
      join(event.latest->spot, stream);
    } else if (stream->capture != nullptr) {
      throw Failure(kCaptureDependency, "a capture waits for an event from outside");
    } else if (!event.latest->reached) {
      engine.put(stream, {"event wait", waiting(event.latest)});
    }
  }
  engine.called();
}

void reset(Event& event, void* handle) {
  Engine& engine = Engine::get();
  {
    Lock held = engine.lock();
    auto full = event.full;
    put(engine, known(engine, handle), {"event reset", at_once([full] { full->store(0); })});
  }
  engine.called();
}

bool query(Event& event) {
  Engine& engine = Engine::get();
  {
    Lock held = engine.lock();
    if (event.latest == nullptr || event.latest->reached) return true;
    Recording& recording = *event.latest;
    check_outside_capture(recording);
    check(recording);
    if (recording.asked == 0) recording.asked = now();
    if (now() - recording.asked > config().patience) {
      engine.demand(recording.stream, recording.place);
    }
  }
  engine.asked();
  return false;
}

bool synchronize(Event& event, int64_t milliseconds) {
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  const auto recording = event.latest;
  if (recording == nullptr) return true;
  check_outside_capture(*recording);
  engine.demand(recording->stream, recording->place);
  const auto over = [&] { return recording->reached || recording->stream->error != 0; };
  const bool ready = engine.wait(held, over, milliseconds);
  check(*recording);
  return ready;
}

}  // namespace npusim
