// Lots: layers that are staged, verified and committed together.
#pragma once

#include <vector>

#include "migration/spec.h"

namespace equipoise {

// Returns where each lot begins in `cargo.order`, and its end. Layers join in the given order, as
// long as no rank has more than half of its staging buffers to fill: so that the next lot can
// travel while this one is voted on. A layer that needs more than half is a lot by itself.
// Throws std::invalid_argument where one needs more than all, on the first such layer and rank.
std::vector<std::int32_t> group_into_chunks(const MigrationSpec& spec);

}  // namespace equipoise
