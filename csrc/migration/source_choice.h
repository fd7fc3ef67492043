// Which copy each move reads.
#pragma once

#include <vector>

#include "migration/installed_slots.h"

namespace equipoise {

// Fills in the source of every move, and its round where that is local. The moves are by lot.
//
// Each reads from the nearest choice (csrc/migration/installed_slots.h) whose rank has sent least
// so far, ties to the lower slot. Then the rank that has sent most is relieved, first over all
// moves, then within each lot, as long as that lowers the largest number of copies that one rank
// sends.
void choose_sources(const InstalledSlots& installed, std::vector<SlotMove>& moves);

}  // namespace equipoise
