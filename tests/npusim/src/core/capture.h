// Graphs: what was submitted to capturing streams, and how it is run again.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "engine.h"

namespace npusim {

// A task, or the wait for a task of another branch.
struct Node {
  Task task;
  int branch = -1;    // >= 0: waits until that branch has come past `place`
  size_t place = 0;
};

// One list of nodes for each stream that took part.
using Branches = std::vector<std::vector<Node>>;

// A finished graph; kept alive by its replays.
struct Graph {
  uint32_t id = 0;
  Branches branches;
};

// Where in a capture an event was recorded.
struct Spot {
  Capture* capture = nullptr;
  int branch = 0;
  size_t place = 0;  // nodes of that branch before it
};

// A graph in the making. Guarded by the engine's lock. Throws Failure.
class Capture {
 public:
  Capture(Stream* origin, int mode);

  void add(Stream* stream, Task task);
  Spot spot(Stream* stream);
  // Makes `stream` a part of the capture, if it is none, and lets it wait for the spot.
  void join(Stream* stream, const Spot& spot);
  // Ends it: every stream that joined must have been waited for by the origin again.
  std::shared_ptr<Graph> finish(Stream* stream);

  Stream* origin() const { return origin_; }
  int mode() const { return mode_; }
  const std::shared_ptr<Graph>& graph() const { return graph_; }

 private:
  int branch(Stream* stream);
  void leave();

  Stream* origin_;
  int mode_;
  std::shared_ptr<Graph> graph_;
  std::vector<Stream*> streams_;
  std::vector<size_t> waited_;  // by branch: how far some other branch waits for it
};

// A task that runs the graph: its branches take turns.
Body replay(std::shared_ptr<Graph> graph);

}  // namespace npusim
