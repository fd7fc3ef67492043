// Which slot each move reads from.
#pragma once

#include <vector>

#include "migration/installed_slots.h"

namespace equipoise {

// Sets the source of every move, and its round if that is local. The moves are sorted by chunk.
//
// Each move reads from the nearest slots (installed_slots.h), and of those from the one whose rank
// has sent least so far, ties to the lower slot. That is a good start but not the best, because
// early choices do not know the later ones. So the busiest sender is relieved afterwards
// (sender_balance.h): first over all moves, then within each chunk, since time is spent chunk by
// chunk.
void choose_sources(const InstalledSlots& installed, std::vector<SlotMove>& moves);

}  // namespace equipoise
