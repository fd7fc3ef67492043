#include "migration/installed_slots.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "routing/routing_table.h"

namespace equipoise {
namespace {

// Returns those of the ascending `slots` that are in the same block of `width` slots as `slot`: the
// slots of a rank, or of a node.
Ids in_same_block(Ids slots, std::int32_t slot, std::int32_t width) {
    const std::int32_t low = slot / width * width;
    const auto* first = std::lower_bound(slots.begin(), slots.end(), low);
    const auto* last = std::lower_bound(first, slots.end(), low + width);
    return {first, static_cast<std::size_t>(last - first)};
}

}  // namespace

InstalledSlots::InstalledSlots(const MigrationSpec& spec)
    : spec_(spec),
      start_(static_cast<std::size_t>(spec.layers) * (spec.experts + 1)),
      slots_(static_cast<std::size_t>(spec.layers) * spec.slots) {
    const auto columns = static_cast<std::size_t>(spec.experts) + 1;
    const auto width = static_cast<std::size_t>(spec.slots);
    for (std::int32_t layer : spec.order) {
        sort_slots(spec.before(layer), {start_.data() + layer * columns, columns},
                   {slots_.data() + layer * width, width});
        require_held(layer);
    }
}

Ids InstalledSlots::sources_for(const SlotMove& move) const {
    const Ids all = of(move.layer, move.expert);
    const Ids own = in_same_block(all, move.slot, spec_.per_rank());
    if (own.size > 0) return own;
    const Ids close = in_same_block(all, move.slot, spec_.per_node());
    return close.size > 0 ? close : all;
}

Ids InstalledSlots::of(std::int32_t layer, std::int32_t expert) const {
    const std::int32_t* start =
        start_.data() + static_cast<std::size_t>(layer) * (spec_.experts + 1) + expert;
    return {slots_.data() + static_cast<std::size_t>(layer) * spec_.slots + start[0],
            static_cast<std::size_t>(start[1] - start[0])};
}

void InstalledSlots::require_held(std::int32_t layer) const {
    for (std::int32_t expert : spec_.after(layer))
        if (of(layer, expert).size == 0)
            throw std::invalid_argument("proposed: no slot of layer " + std::to_string(layer) +
                                        " holds expert " + std::to_string(expert) +
                                        " in the installed placement");
}

}  // namespace equipoise
