// What a test chooses (see steering.py).

#include <vector>

#include "../core/engine.h"
#include "api.h"

// The schedule's choices from now on, one byte each; when they are used up the oldest stream that
// can run does, and nothing runs that nobody waits for.
NPUSIM_API void npusim_steer(const uint8_t* choices, size_t count) {
  npusim::Engine::get().steer(std::vector<uint8_t>(choices, choices + count));
}
