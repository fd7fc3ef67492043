// Capture and replay.

#include <algorithm>
#include <vector>

#include "../core/capture.h"
#include "../core/engine.h"
#include "api.h"

using namespace npusim;

namespace {

// Numbers of aclmdlRICaptureMode: how much of what the program does a capture forbids.
enum CaptureMode : int { kGlobal, kThreadLocal, kRelaxed };

thread_local int t_mode = kGlobal;

// What the program holds: a graph in the making or a finished one.
struct Model {
  std::unique_ptr<Capture> capture;
  std::shared_ptr<Graph> graph;
};

// The captures that go on; guarded by the engine's lock.
std::vector<Model*>& going_on() {
  static auto* const kept = new std::vector<Model*>;
  return *kept;
}

Model* model_of(const Stream* stream) {
  for (Model* model : going_on()) {
    if (model->capture.get() == stream->capture) return model;
  }
  return nullptr;
}

Stream* known(Engine& engine, void* handle) {
  Stream* const stream = engine.find(handle);
  if (stream == nullptr) throw Failure(kUnknownStream, "no such stream");
  return stream;
}

}  // namespace

namespace npusim {

void forbid_while_capturing(const char* name) {
  Engine& engine = Engine::get();
  Lock held = engine.lock();
  if (t_mode == kRelaxed) return;
  for (const Model* model : going_on()) {
    if (model->capture->mode() == kGlobal) {
      throw Failure(kStreamCaptured, text("%s while a stream is captured", name));
    }
  }
}

}  // namespace npusim

NPUSIM_API int aclmdlRICaptureBegin(void* handle, int mode) {
  return guarded("aclmdlRICaptureBegin", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    Stream* const stream = known(engine, handle);
    if (stream->capture != nullptr) throw Failure(kStreamCaptured, "it is being captured already");
    auto model = std::make_unique<Model>();
    model->capture = std::make_unique<Capture>(stream, mode);
    model->graph = model->capture->graph();
    going_on().push_back(model.release());
  });
}

NPUSIM_API int aclmdlRICaptureGetInfo(void* handle, int* status, void** out) {
  return guarded("aclmdlRICaptureGetInfo", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    const Stream* const stream = known(engine, handle);
    *status = stream->capture != nullptr ? 1 : 0;
    if (out != nullptr) *out = stream->capture != nullptr ? model_of(stream) : nullptr;
  });
}

NPUSIM_API int aclmdlRICaptureEnd(void* handle, void** out) {
  return guarded("aclmdlRICaptureEnd", [=] {
    Engine& engine = Engine::get();
    Lock held = engine.lock();
    Stream* const stream = known(engine, handle);
    if (stream->capture == nullptr) throw Failure(kStreamNotCaptured, "it is not being captured");
    Model* const model = model_of(stream);
    auto& models = going_on();
    models.erase(std::find(models.begin(), models.end(), model));
    const auto capture = std::move(model->capture);
    *out = model;
    capture->finish(stream);
  });
}

NPUSIM_API int aclmdlRICaptureThreadExchangeMode(int* mode) {
  std::swap(t_mode, *mode);
  return kOk;
}

NPUSIM_API int aclmdlRIExecuteAsync(void* handle, void* stream) {
  return guarded("aclmdlRIExecuteAsync", [=] {
    auto* const model = static_cast<Model*>(handle);
    const int code = submit(stream, text("graph %u", model->graph->id), replay(model->graph));
    if (code != kOk) throw Failure(code, recent_error());
  });
}

NPUSIM_API int aclmdlRIGetId(void* handle, uint32_t* id) {
  return guarded("aclmdlRIGetId", [=] { *id = static_cast<Model*>(handle)->graph->id; });
}

// Replays that still run keep the graph.
NPUSIM_API int aclmdlRIDestroy(void* handle) {
  return guarded("aclmdlRIDestroy", [=] { delete static_cast<Model*>(handle); });
}
