#include "migration/migration_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

#include "migration/edge_colouring.h"
#include "migration/layer_chunks.h"
#include "migration/source_choice.h"

namespace equipoise {
namespace {

void require_order(const Cargo& cargo) {
    std::vector<std::uint8_t> listed(cargo.layers);
    for (std::int32_t layer : cargo.order) {
        if (listed[layer])
            throw std::invalid_argument("order: layer " + std::to_string(layer) + " stands twice");
        listed[layer] = 1;
    }
    for (std::int32_t layer = 0; layer < cargo.layers; ++layer) {
        const Ids before = cargo.before(layer), after = cargo.after(layer);
        if (!listed[layer] && !std::equal(before.begin(), before.end(), after.begin()))
            throw std::invalid_argument("order: layer " + std::to_string(layer) +
                                        " changes and is missing");
    }
}

std::vector<Move> list_moves(const Cargo& cargo, const std::vector<std::int32_t>& lots) {
    std::vector<Move> moves;
    for (std::size_t lot = 0; lot + 1 < lots.size(); ++lot)
        for (std::int32_t i = lots[lot]; i < lots[lot + 1]; ++i) {
            const std::int32_t layer = cargo.order[i];
            const Ids before = cargo.before(layer), after = cargo.after(layer);
            for (std::int32_t slot = 0; slot < cargo.slots; ++slot)
                if (before[slot] != after[slot])
                    moves.push_back({layer, slot, after[slot], 0, static_cast<std::int32_t>(lot), 0, 0});
        }
    return moves;
}

// Cuts the moves of a lot, by sender and receiver, into blobs; whose[i] is the blob of move i.
std::vector<Blob> cut(const Cargo& cargo, Span<Move> moves, std::vector<std::int32_t>& whose) {
    std::vector<Blob> blobs;
    std::int32_t room = 0;
    for (std::size_t i = 0; i < moves.size; ++i) {
        whose[i] = kLocal;
        if (moves[i].round == kLocal) continue;
        const std::int32_t from = cargo.rank_of(moves[i].source), to = cargo.rank_of(moves[i].slot);
        const bool same =
            !blobs.empty() && blobs.back().source == from && blobs.back().destination == to;
        if (!same || room == 0) {
            blobs.push_back({from, to, 0});
            room = cargo.parcel;
        }
        --room;
        whose[i] = static_cast<std::int32_t>(blobs.size()) - 1;
    }
    return blobs;
}

std::int32_t schedule(const Cargo& cargo, Span<Move> lot) {
    std::sort(lot.begin(), lot.end(), [&](const Move& a, const Move& b) {
        return std::tuple(cargo.rank_of(a.source), cargo.rank_of(a.slot), a.layer, a.slot) <
               std::tuple(cargo.rank_of(b.source), cargo.rank_of(b.slot), b.layer, b.slot);
    });
    std::vector<std::int32_t> whose(lot.size);
    std::vector<Blob> blobs = cut(cargo, lot, whose);
    const std::int32_t rounds = assign_rounds(blobs, cargo.ranks);
    for (std::size_t i = 0; i < lot.size; ++i)
        if (whose[i] != kLocal) lot[i].round = blobs[whose[i]].round;
    std::sort(lot.begin(), lot.end(), [&](const Move& a, const Move& b) {
        return std::tuple(cargo.rank_of(a.slot), a.round, a.layer, a.slot) <
               std::tuple(cargo.rank_of(b.slot), b.round, b.layer, b.slot);
    });
    return rounds;
}

void schedule_lots(const Cargo& cargo, Shipment& shipment) {
    auto first = shipment.moves.begin();
    for (std::int32_t lot = 0; lot + 1 < static_cast<std::int32_t>(shipment.lots.size()); ++lot) {
        const auto last = std::find_if(first, shipment.moves.end(),
                                       [lot](const Move& move) { return move.lot != lot; });
        Move* data = shipment.moves.data() + (first - shipment.moves.begin());
        shipment.rounds.push_back(schedule(cargo, {data, static_cast<std::size_t>(last - first)}));
        first = last;
    }
}

// From counts, shifted by one, to where each run begins.
void sum_up(std::vector<std::int32_t>& counts) {
    std::partial_sum(counts.begin(), counts.end(), counts.begin());
}

void index(const Cargo& cargo, Shipment& shipment) {
    const std::size_t places = shipment.rounds.size() * cargo.ranks;
    shipment.arrivals.assign(places + 1, 0);
    shipment.leaving.assign(places + 1, 0);
    const auto left = [&](const Move& move) {
        return move.lot * cargo.ranks + cargo.rank_of(move.source);
    };
    for (std::size_t i = 0; i < shipment.moves.size(); ++i) {
        const Move& move = shipment.moves[i];
        ++shipment.arrivals[move.lot * cargo.ranks + cargo.rank_of(move.slot) + 1];
        if (move.round == kLocal) continue;
        ++shipment.leaving[left(move) + 1];
        shipment.departures.push_back(static_cast<std::int32_t>(i));
    }
    sum_up(shipment.arrivals);
    sum_up(shipment.leaving);
    std::sort(shipment.departures.begin(), shipment.departures.end(),
              [&](std::int32_t x, std::int32_t y) {
                  const Move &a = shipment.moves[x], &b = shipment.moves[y];
                  return std::tuple(left(a), a.round, a.layer, a.slot) <
                         std::tuple(left(b), b.round, b.layer, b.slot);
              });
}

void give_buffers(const Cargo& cargo, Shipment& shipment) {
    const auto places = static_cast<std::int32_t>(shipment.arrivals.size()) - 1;
    for (std::int32_t place = 0; place < places; ++place) {
        const std::int32_t first = shipment.arrivals[place], last = shipment.arrivals[place + 1];
        const bool even = place / cargo.ranks % 2 == 0;
        std::int32_t buffer = even ? 0 : cargo.staging - (last - first);
        for (std::int32_t i = first; i < last; ++i) shipment.moves[i].staging = buffer++;
    }
}

}  // namespace

Shipment ship(const Cargo& cargo) {
    require_order(cargo);
    Shipment shipment;
    shipment.lots = group_layers(cargo);
    shipment.moves = list_moves(cargo, shipment.lots);
    choose_sources(Holders(cargo), shipment.moves);
    schedule_lots(cargo, shipment);
    index(cargo, shipment);
    give_buffers(cargo, shipment);
    return shipment;
}

}  // namespace equipoise
