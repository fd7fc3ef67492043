// Graphs: what was submitted to capturing streams, and how it is run again.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "engine.h"

namespace npusim {

// A task, or the wait for a task of another branch.
struct Node {
  Task task;
  int branch = -1;    // >= 0: waits until that branch has come past `place`
  size_t place = 0;
};

// Numbers of aclmdlRICaptureMode: who may call unsafe functions while a stream is captured.
enum CaptureMode : int { kGlobal, kThreadLocal, kRelaxed };

// One list of nodes for each stream that took part.
using Branches = std::vector<std::vector<Node>>;

// A finished graph; kept alive by its replays.
struct Graph {
  uint32_t id = 0;
  Branches branches;
};

// Where in a capture an event was recorded. The event may outlive the capture.
struct Spot {
  std::weak_ptr<Capture> capture;
  int branch = 0;
  size_t place = 0;  // nodes of that branch before it
};

// A graph in the making. Guarded by the engine's lock. Throws Failure.
class Capture : public std::enable_shared_from_this<Capture> {
 public:
  Capture(Stream* origin, int mode);

  void add(Stream* stream, Task task);
  Spot spot(Stream* stream);
  // Makes `stream` a part of the capture, if it is none, and lets it wait for the spot.
  void join(Stream* stream, const Spot& spot);
  // Ends it, whatever it throws but for a stream that is not the origin: on the thread that began
  // it (unless relaxed), and every stream that joined must have been waited for again.
  std::shared_ptr<Graph> finish(Stream* stream);

  Stream* origin() const { return origin_; }
  int mode() const { return mode_; }
  // Whether the calling thread began it.
  bool mine() const { return thread_ == std::this_thread::get_id(); }
  const std::shared_ptr<Graph>& graph() const { return graph_; }

 private:
  int branch(Stream* stream);
  void leave();

  Stream* origin_;
  int mode_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::shared_ptr<Graph> graph_;
  std::vector<Stream*> streams_;
  std::vector<size_t> waited_;  // by branch: how far some other branch waits for it
};

// The calling thread's own mode from now on; returns the former one.
int exchange_mode(int mode);
// Whether a capture forbids the calling thread unsafe functions: blocking copies, asynchronous ones
// with pageable memory, the default stream. Under the engine's lock, as the next one.
bool unsafe_now();
// Throws Failure(kCaptureImplicit) where it forbids work on this stream.
void check_default(const Stream* stream);

// A task that runs the graph: its branches take turns.
Body replay(std::shared_ptr<Graph> graph);

}  // namespace npusim
