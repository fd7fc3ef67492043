// Links between ranks that never met, built by the calling thread at first use.
#pragma once

#include <vector>

#include "communicator.h"

namespace npusim::hccl {

// HCCL's calls allocate the links of an operation's kind before they launch it, and join the
// threads that connect (hcomm: TransportManager::Alloc, IncreAlloc), so they block until the other
// ends call, too. The three below do nothing from the second time on, or when links are built on
// the stream. They throw Refusal after HCCL_CONNECT_TIMEOUT, or when the communicator is destroyed
// meanwhile.

// All ranks call a collective of this kind.
void link_all(Communicator& communicator, const Descriptor& what);
// The peer calls the receive to this send, or the other way round.
void link_pair(Communicator& communicator, const Descriptor& what);
// Each of these ranks calls a batch in which this rank takes part.
void link_batch(Communicator& communicator, const std::vector<int>& peers);

}  // namespace npusim::hccl
