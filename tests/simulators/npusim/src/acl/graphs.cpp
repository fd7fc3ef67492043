// Capture and replay.

#include "../core/capture.h"

#include <set>

#include "../core/engine.h"
#include "api.h"

using namespace npusim;

namespace {

// What the program holds: a graph in the making or a finished one.
struct Model {
  std::shared_ptr<Capture> capture;
  std::shared_ptr<Graph> graph;
};

// Those that live; guarded by the engine's lock.
std::set<void*>& models() {
  static auto* const kept = new std::set<void*>;
  return *kept;
}

Model* captured(const Stream* stream) {
  for (void* handle : models()) {
    auto* const model = static_cast<Model*>(handle);
    if (model->capture != nullptr && model->capture.get() == stream->capture) return model;
  }
  return nullptr;
}

Model& model_at(void* handle, const char* name) {
  if (models().count(handle) != 0) return *static_cast<Model*>(handle);
  fault(text("%s: %p is no graph", name, handle));
  throw Failure(kInvalidParam, "no such graph");
}

Model& finished(void* handle, const char* name) {
  Model& model = model_at(handle, name);
  if (model.capture != nullptr) {
    fault(text("%s: the graph is still being captured", name));
    throw Failure(kModelCaptured, "a graph in the making");
  }
  return model;
}

void discard(Model* model) {
  models().erase(model);
  delete model;
}

}  // namespace

namespace npusim {

void forbid_unsafe(const char* name) {
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  if (unsafe_now()) throw Failure(kCaptureMode, text("%s while a stream is captured", name));
}

}  // namespace npusim

NPUSIM_API int aclmdlRICaptureBegin(void* handle, int mode) {
  return guarded("aclmdlRICaptureBegin", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    Stream* const stream = engine.get(handle);
    if (stream == engine.standard(stream->device)) {
      throw Failure(kFeature, "the default stream cannot be captured");
    }
    if (stream->capture != nullptr) throw Failure(kStreamCaptured, "it is being captured already");
    auto model = std::make_unique<Model>();
    model->capture = std::make_shared<Capture>(stream, mode);
    model->graph = model->capture->graph();
    models().insert(model.release());
  });
}

NPUSIM_API int aclmdlRICaptureGetInfo(void* handle, int* status, void** out) {
  return guarded("aclmdlRICaptureGetInfo", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    const Stream* const stream = engine.get(handle);
    *status = stream->capture != nullptr ? 1 : 0;
    if (out != nullptr) *out = stream->capture != nullptr ? captured(stream) : nullptr;
  });
}

// A capture that does not end well is gone, and its graph with it; but one that is ended on a
// stream which only joined it goes on.
NPUSIM_API int aclmdlRICaptureEnd(void* handle, void** out) {
  return guarded("aclmdlRICaptureEnd", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    *out = nullptr;
    Stream* const stream = engine.get(handle);
    if (stream->capture == nullptr) throw Failure(kStreamNotCaptured, "it is not being captured");
    Model* const model = captured(stream);
    try {
      model->capture->finish(stream);
    } catch (const Failure&) {
      if (stream->capture == nullptr) discard(model);
      throw;
    }
    model->capture = nullptr;
    *out = model;
  });
}

NPUSIM_API int aclmdlRICaptureThreadExchangeMode(int* mode) {
  *mode = exchange_mode(*mode);
  return kOk;
}

NPUSIM_API int aclmdlRIExecuteAsync(void* handle, void* stream) {
  return guarded("aclmdlRIExecuteAsync", [=] {
    std::shared_ptr<Graph> graph;
    {
      Engine& engine = Engine::get();
      Lock held = engine.lock();
      graph = finished(handle, "aclmdlRIExecuteAsync").graph;
    }
    const int code = submit(stream, text("graph %u", graph->id), replay(graph));
    if (code != kOk) throw Failure(code, recent_error());
  });
}

NPUSIM_API int aclmdlRIGetId(void* handle, uint32_t* id) {
  return guarded("aclmdlRIGetId", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    *id = model_at(handle, "aclmdlRIGetId").graph->id;
  });
}

// Replays that still run keep the graph.
NPUSIM_API int aclmdlRIDestroy(void* handle) {
  return guarded("aclmdlRIDestroy", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    discard(&finished(handle, "aclmdlRIDestroy"));
  });
}
