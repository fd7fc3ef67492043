#include "capture.h"

#include <algorithm>
#include <atomic>

#include "errors.h"
#include "fault.h"

namespace npusim {
namespace {

std::atomic<uint32_t> next_graph{1};
thread_local int t_mode = kGlobal;

// Those that go on.
std::vector<const Capture*>& captures() {
  static auto* const kept = new std::vector<const Capture*>;
  return *kept;
}

// The strictest mode of those that go on, or of those that the calling thread began.
int strictest(bool mine) {
  int mode = kRelaxed;
  for (const Capture* capture : captures()) {
    if (!mine || capture->mine()) mode = std::min(mode, capture->mode());
  }
  return mode;
}

// The state of one replay.
struct Replay {
  std::shared_ptr<Graph> graph;
  std::vector<size_t> places;
  std::vector<Body> bodies;
  size_t next = 0;

  explicit Replay(std::shared_ptr<Graph> of)
      : graph(std::move(of)), places(graph->branches.size()), bodies(graph->branches.size()) {}

  bool over() const {
    for (size_t k = 0; k < places.size(); ++k) {
      if (places[k] < graph->branches[k].size()) return false;
    }
    return true;
  }

  Turn turn() {
    const size_t count = places.size();
    for (size_t k = 0; k < count; ++k) {
      const size_t branch = (next + k) % count;
      if (places[branch] == graph->branches[branch].size()) continue;
      if (step(branch) == Turn::kBlocked) continue;
      next = branch + 1;
      return over() ? Turn::kDone : Turn::kAgain;
    }
    return over() ? Turn::kDone : Turn::kBlocked;
  }

  Turn step(size_t branch) {
    const Node& node = graph->branches[branch][places[branch]];
    if (node.branch >= 0) {
      if (places[static_cast<size_t>(node.branch)] < node.place) return Turn::kBlocked;
      ++places[branch];
      return Turn::kDone;
    }
    if (!bodies[branch]) bodies[branch] = node.task.body;  // a fresh copy for each replay
    const Turn got = bodies[branch]();
    if (got == Turn::kDone) {
      bodies[branch] = nullptr;
      ++places[branch];
    }
    return got;
  }
};

}  // namespace

Capture::Capture(Stream* origin, int mode)
    : origin_(origin), mode_(mode), graph_(std::make_shared<Graph>()) {
  graph_->id = next_graph++;
  branch(origin);
  captures().push_back(this);
}

int Capture::branch(Stream* stream) {
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found != streams_.end()) return static_cast<int>(found - streams_.begin());
  if (stream->capture != nullptr && stream->capture != this) {
    throw Failure(kStreamCaptured, "a stream takes part in two captures");
  }
  stream->capture = this;
  streams_.push_back(stream);
  waited_.push_back(0);
  graph_->branches.emplace_back();
  return static_cast<int>(streams_.size()) - 1;
}

void Capture::add(Stream* stream, Task task) {
  if (tracing()) trace(text("stream %d: captured %s", stream->id, task.what.c_str()));
  graph_->branches[static_cast<size_t>(branch(stream))].push_back({std::move(task)});
}

Spot Capture::spot(Stream* stream) {
  const int at = branch(stream);
  return {weak_from_this(), at, graph_->branches[static_cast<size_t>(at)].size()};
}

void Capture::join(Stream* stream, const Spot& spot) {
  if (spot.capture.lock().get() != this) {
    throw Failure(kCaptureConflict, "an event of another capture");
  }
  const int at = branch(stream);
  if (at == spot.branch) return;
  Node node;
  node.branch = spot.branch;
  node.place = spot.place;
  graph_->branches[static_cast<size_t>(at)].push_back(std::move(node));
  size_t& reached = waited_[static_cast<size_t>(spot.branch)];
  reached = std::max(reached, spot.place);
}

void Capture::leave() {
  captures().erase(std::find(captures().begin(), captures().end(), this));
  for (Stream* stream : streams_) stream->capture = nullptr;
}

std::shared_ptr<Graph> Capture::finish(Stream* stream) {
  if (stream != origin_) throw Failure(kCaptureUnmatched, "a capture ends where it began");
  leave();
  if (mode_ != kRelaxed && !mine()) {
    throw Failure(kCaptureWrongThread, "a capture ends on the thread that began it");
  }
  for (size_t k = 1; k < streams_.size(); ++k) {
    if (waited_[k] == graph_->branches[k].size()) continue;
    throw Failure(kStreamUnjoined,
                  text("stream %d joined a capture and nobody waits for its end", streams_[k]->id));
  }
  return graph_;
}

int exchange_mode(int mode) {
  std::swap(t_mode, mode);
  return mode;
}

// As the open CANN runtime decides it (CaptureSession::IsCaptureModeSupport).
bool unsafe_now() {
  if (t_mode == kRelaxed) return false;
  const int mine = strictest(true);
  if (t_mode == kThreadLocal) return mine != kRelaxed;
  return strictest(false) == kGlobal || mine == kThreadLocal;
}

void check_default(const Stream* stream) {
  if (stream != Engine::get().standard(stream->device) || !unsafe_now()) return;
  throw Failure(kCaptureImplicit, "work on the default stream while another one is captured");
}

Body replay(std::shared_ptr<Graph> graph) {
  // Shared with the copy that a run moves about; made when the task is submitted, so one replay.
  auto state = std::make_shared<Replay>(std::move(graph));
  return [state] { return state->over() ? Turn::kDone : state->turn(); };
}

}  // namespace npusim
