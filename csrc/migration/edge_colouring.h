// Rounds: in each a rank sends at most one blob, and receives at most one.
#pragma once

#include <vector>

#include "common/span.h"

namespace equipoise {

// A blob that travels. `round` is what is looked for.
struct Message {
    std::int32_t source, destination;
    std::int32_t round;
};

// Gives every blob a round and returns how many there are: as few as there can be, which is the
// most blobs that one rank sends or receives.
//
// Ranks that send and ranks that receive are the two sides of a bipartite multigraph, and rounds
// are colours of its edges; that as many colours as the largest degree suffice is the theorem of
// Koenig (1916). An edge whose ends have no free colour in common gets one by its proof: on the
// path that alternates between a colour free at the one end and a colour free at the other, the two
// are exchanged.
std::int32_t assign_rounds(std::vector<Message>& messages, std::int32_t ranks);

}  // namespace equipoise
