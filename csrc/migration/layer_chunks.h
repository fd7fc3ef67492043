// Chunks: layers that are staged, verified and committed together.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

// Returns where each chunk begins in `spec.order`, and the end of the last. Layers join a chunk in
// the given order as long as no rank has to fill more than half of its staging buffers: the next
// chunk travels while this one is voted on, and needs the other half. A layer that needs more than
// half is a chunk by itself. Throws std::invalid_argument, for the first layer and rank, if one
// needs more than all.
std::vector<std::int32_t> group_into_chunks(const MigrationSpec& spec);

}  // namespace equipoise
