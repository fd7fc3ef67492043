// Where a root says which file its communicators meet in.
#pragma once

#include <cstdint>

#include "pause.h"
#include "segment.h"

namespace npusim::hccl {

// One file a process holds an entry for each root information it gave out, and says there which
// file the ranks meet in once the root itself has joined: a root that never does holds nothing.

// A new entry of this process, without a file.
RootInfo announce();
// The file of an entry of this process, made by `make` if there is none yet.
int publish(const RootInfo& info, int (*make)(uint64_t token));
// The file of an entry of another process, opened; waits for it. -1 if none.
int look_up(const RootInfo& info, const Patience& patience);
// Closes the file of an entry of this process, if it has one.
void withdraw(const RootInfo& info);

}  // namespace npusim::hccl
