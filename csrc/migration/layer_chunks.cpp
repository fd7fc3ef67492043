#include "migration/layer_chunks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace equipoise {
namespace {

using Needs = std::vector<std::int32_t>;  // staging buffers by rank

// Copies that only change place within their rank count too: they go through staging, because a
// swap would overwrite its own source.
void count_needs(const Cargo& cargo, std::int32_t layer, Needs& needs) {
    const Ids before = cargo.before(layer), after = cargo.after(layer);
    std::size_t slot = 0;
    for (std::int32_t& need : needs) {
        need = 0;
        for (std::int32_t i = 0; i < cargo.per_rank(); ++i, ++slot)
            need += before[slot] != after[slot];
    }
}

void require_room(const Needs& needs, std::int32_t layer, std::int32_t staging) {
    for (std::size_t rank = 0; rank < needs.size(); ++rank)
        if (needs[rank] > staging)
            throw std::invalid_argument("staging: layer " + std::to_string(layer) + " fills " +
                                        std::to_string(needs[rank]) + " slots of rank " +
                                        std::to_string(rank) + ", which has " +
                                        std::to_string(staging) + " staging buffers");
}

bool join(Needs& lot, const Needs& layer, std::int32_t most) {
    for (std::size_t rank = 0; rank < lot.size(); ++rank)
        if (lot[rank] + layer[rank] > most) return false;
    for (std::size_t rank = 0; rank < lot.size(); ++rank) lot[rank] += layer[rank];
    return true;
}

}  // namespace

std::vector<std::int32_t> group_layers(const Cargo& cargo) {
    Needs lot(cargo.ranks), layer(cargo.ranks);
    std::vector<std::int32_t> first;
    for (std::size_t i = 0; i < cargo.order.size; ++i) {
        count_needs(cargo, cargo.order[i], layer);
        require_room(layer, cargo.order[i], cargo.staging);
        if (!first.empty() && join(lot, layer, cargo.staging / 2)) continue;
        first.push_back(static_cast<std::int32_t>(i));
        lot = layer;
    }
    first.push_back(static_cast<std::int32_t>(cargo.order.size));
    return first;
}

}  // namespace equipoise
