#include "migration/installed_slots.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "routing/routing_table.h"

namespace equipoise {
namespace {

// Those of the ascending `slots` that are in the block of `width` slots that `slot` is in.
Ids near(Ids slots, std::int32_t slot, std::int32_t width) {
    const std::int32_t low = slot / width * width;
    const auto* first = std::lower_bound(slots.begin(), slots.end(), low);
    const auto* last = std::lower_bound(first, slots.end(), low + width);
    return {first, static_cast<std::size_t>(last - first)};
}

}  // namespace

Holders::Holders(const Cargo& cargo)
    : cargo_(cargo),
      start_(static_cast<std::size_t>(cargo.layers) * (cargo.experts + 1)),
      slots_(static_cast<std::size_t>(cargo.layers) * cargo.slots) {
    const auto columns = static_cast<std::size_t>(cargo.experts) + 1;
    const auto width = static_cast<std::size_t>(cargo.slots);
    for (std::int32_t layer : cargo.order) {
        sort_slots(cargo.before(layer), {start_.data() + layer * columns, columns},
                   {slots_.data() + layer * width, width});
        require_held(layer);
    }
}

Ids Holders::choices(const Move& move) const {
    const Ids all = of(move.layer, move.expert);
    const Ids own = near(all, move.slot, cargo_.per_rank());
    if (own.size > 0) return own;
    const Ids close = near(all, move.slot, cargo_.per_node());
    return close.size > 0 ? close : all;
}

Ids Holders::of(std::int32_t layer, std::int32_t expert) const {
    const std::int32_t* start =
        start_.data() + static_cast<std::size_t>(layer) * (cargo_.experts + 1) + expert;
    return {slots_.data() + static_cast<std::size_t>(layer) * cargo_.slots + start[0],
            static_cast<std::size_t>(start[1] - start[0])};
}

void Holders::require_held(std::int32_t layer) const {
    for (std::int32_t expert : cargo_.after(layer))
        if (of(layer, expert).size == 0)
            throw std::invalid_argument("proposed: no slot of layer " + std::to_string(layer) +
                                        " holds expert " + std::to_string(expert) +
                                        " in the installed placement");
}

}  // namespace equipoise
