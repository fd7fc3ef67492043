#include "migration/layer_chunks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace equipoise {
namespace {

using BufferNeeds = std::vector<std::int32_t>;  // staging buffers by rank

// Counts the slots that each rank has to fill. Experts that only change place within their rank
// count too: they go through staging, because a swap would overwrite its own source.
void count_needs(const MigrationSpec& spec, std::int32_t layer, BufferNeeds& needs) {
    const Ids before = spec.before(layer), after = spec.after(layer);
    std::size_t slot = 0;
    for (std::int32_t& need : needs) {
        need = 0;
        for (std::int32_t i = 0; i < spec.per_rank(); ++i, ++slot)
            need += before[slot] != after[slot];
    }
}

void require_staging(const BufferNeeds& needs, std::int32_t layer, std::int32_t staging) {
    for (std::size_t rank = 0; rank < needs.size(); ++rank)
        if (needs[rank] > staging)
            throw std::invalid_argument("staging: layer " + std::to_string(layer) + " fills " +
                                        std::to_string(needs[rank]) + " slots of rank " +
                                        std::to_string(rank) + ", which has " +
                                        std::to_string(staging) + " staging buffers");
}

// A layer is atomic, since its routing table names all its slots: it joins on all ranks or on none.
bool join_if_fits(BufferNeeds& chunk, const BufferNeeds& layer, std::int32_t max_buffers) {
    for (std::size_t rank = 0; rank < chunk.size(); ++rank)
        if (chunk[rank] + layer[rank] > max_buffers) return false;
    for (std::size_t rank = 0; rank < chunk.size(); ++rank) chunk[rank] += layer[rank];
    return true;
}

}  // namespace

std::vector<std::int32_t> group_into_chunks(const MigrationSpec& spec) {
    BufferNeeds chunk(spec.ranks), layer(spec.ranks);
    std::vector<std::int32_t> first;
    for (std::size_t i = 0; i < spec.order.size; ++i) {
        count_needs(spec, spec.order[i], layer);
        require_staging(layer, spec.order[i], spec.staging);
        if (!first.empty() && join_if_fits(chunk, layer, spec.staging / 2)) continue;
        first.push_back(static_cast<std::int32_t>(i));
        chunk = layer;
    }
    first.push_back(static_cast<std::int32_t>(spec.order.size));
    return first;
}

}  // namespace equipoise
