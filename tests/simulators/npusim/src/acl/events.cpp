// Events, and functions of the host as tasks.

#include "../core/event.h"

#include <set>

#include "../core/callbacks.h"
#include "api.h"

using namespace npusim;

namespace {

// Which handles are events; guarded by the engine's lock.
std::set<void*>& known() {
  static auto* const kept = new std::set<void*>;
  return *kept;
}

Event& event_at(void* handle, const char* name) {
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  if (known().count(handle) == 0) {
    fault(text("%s: %p is no event", name, handle));
    throw Failure(kInvalidParam, "no such event");
  }
  return *static_cast<Event*>(handle);
}

int64_t time_of(void* handle) {
  Event& event = event_at(handle, "the time of an event");
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  if (event.latest == nullptr || !event.latest->reached) {
    throw Failure(kInvalidParam, "the time of an event that has not been reached");
  }
  return event.latest->at;
}

int synchronize_event(void* handle, int64_t milliseconds) {
  return guarded("aclrtSynchronizeEvent", [=] {
    Event& event = event_at(handle, "aclrtSynchronizeEvent");
    if (!synchronize(event, milliseconds)) throw Failure(kEventTimeout, "an event");
  });
}

}  // namespace

NPUSIM_API int aclrtCreateEventExWithFlag(void** out, uint32_t flags) {
  return guarded("aclrtCreateEventExWithFlag", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    Event* const event = new Event(flags);
    known().insert(event);
    *out = event;
  });
}

NPUSIM_API int aclrtCreateEventWithFlag(void** out, uint32_t flags) {
  return aclrtCreateEventExWithFlag(out, flags);
}

// What waits for the event keeps its recording.
NPUSIM_API int aclrtDestroyEvent(void* handle) {
  return guarded("aclrtDestroyEvent", [=] {
    Event* const event = &event_at(handle, "aclrtDestroyEvent");
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    known().erase(event);
    delete event;
  });
}

NPUSIM_API int aclrtRecordEvent(void* event, void* stream) {
  return guarded("aclrtRecordEvent", [=] { record(event_at(event, "aclrtRecordEvent"), stream); });
}

NPUSIM_API int aclrtResetEvent(void* event, void* stream) {
  return guarded("aclrtResetEvent", [=] { reset(event_at(event, "aclrtResetEvent"), stream); });
}

NPUSIM_API int aclrtStreamWaitEvent(void* stream, void* event) {
  return guarded("aclrtStreamWaitEvent",
                 [=] { wait(event_at(event, "aclrtStreamWaitEvent"), stream); });
}

NPUSIM_API int aclrtQueryEventStatus(void* event, int* status) {
  return guarded("aclrtQueryEventStatus",
                 [=] { *status = query(event_at(event, "aclrtQueryEventStatus")) ? 1 : 0; });
}

// The same the other way round: 0 means that the waits have been passed.
NPUSIM_API int aclrtQueryEventWaitStatus(void* event, int* status) {
  return guarded("aclrtQueryEventWaitStatus",
                 [=] { *status = query(event_at(event, "aclrtQueryEventWaitStatus")) ? 0 : 1; });
}

NPUSIM_API int aclrtSynchronizeEvent(void* event) { return synchronize_event(event, -1); }

NPUSIM_API int aclrtSynchronizeEventWithTimeout(void* event, int32_t milliseconds) {
  return synchronize_event(event, milliseconds);
}

NPUSIM_API int aclrtEventElapsedTime(float* milliseconds, void* first, void* last) {
  return guarded("aclrtEventElapsedTime", [=] {
    const int64_t passed = time_of(last) - time_of(first);
    *milliseconds = static_cast<float>(static_cast<double>(passed) / 1e6);
  });
}

NPUSIM_API int aclrtEventGetTimestamp(void* event, uint64_t* microseconds) {
  return guarded("aclrtEventGetTimestamp", [=] {
    *microseconds = static_cast<uint64_t>(time_of(event)) / 1000;
  });
}

NPUSIM_API int aclrtSubscribeReport(uint64_t thread, void* stream) {
  return guarded("aclrtSubscribeReport", [=] { subscribe(thread, stream); });
}

NPUSIM_API int aclrtUnSubscribeReport(uint64_t thread, void* stream) {
  return guarded("aclrtUnSubscribeReport", [=] { unsubscribe(thread, stream); });
}

NPUSIM_API int aclrtLaunchCallback(HostFunction function, void* data, int block, void* stream) {
  return guarded("aclrtLaunchCallback",
                 [=] { launch_callback(function, data, block != 0, stream); });
}

NPUSIM_API int aclrtProcessReport(int32_t milliseconds) {
  return guarded("aclrtProcessReport", [=] {
    if (!process_report(milliseconds)) throw Failure(kWaitTimeout, "no report");
  });
}

NPUSIM_API int aclrtLaunchHostFunc(void* stream, HostFunction function, void* data) {
  return guarded("aclrtLaunchHostFunc", [=] { launch_host_function(function, data, stream); });
}
