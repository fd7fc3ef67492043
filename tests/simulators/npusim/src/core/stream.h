// Streams, the tasks on them, and who runs next.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace npusim {

// What one turn of a task achieved.
enum class Turn {
  kDone,     // the task has ended
  kAgain,    // it got somewhere and wants another turn; others may run in between
  kBlocked,  // it cannot go on until something else happens; it is asked again
};

// One task: called turn by turn from one thread, never while the simulator's lock is held, so it
// may call `fault`, `host` and `demand`. It must not block. State lives in the closure (mutable
// lambda); a graph takes a copy of the fresh closure for every replay. A Failure that it throws
// becomes the stream's sticky error.
using Body = std::function<Turn()>;

struct Stream;

// Puts a task at the end of a stream, or into the graph that the stream is being captured into.
// `handle` is what the program calls aclrtStream; null is the current device's default stream.
// Returns an error code; does not throw.
int submit(void* handle, const std::string& what, Body body);

// A task that does everything at once.
template <typename Function>
Body at_once(Function function) {
  return [function]() mutable {
    function();
    return Turn::kDone;
  };
}

// Says that something outside any stream has changed, on which a blocked task may depend.
void nudge();

// The device that the calling thread works with from now on; -1 for none.
void choose_device(int device);

// That device; throws Failure(kNoContext) when there is none.
int current_device();

// Copies in two halves with a pause between them unless the schedule is eager: a reader that is not
// ordered behind it sees it torn.
Body copy_bytes(void* to, const void* from, size_t bytes);

}  // namespace npusim
