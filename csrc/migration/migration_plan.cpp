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

void require_order(const MigrationSpec& spec) {
    std::vector<std::uint8_t> listed(spec.layers);
    for (std::int32_t layer : spec.order) {
        if (listed[layer])
            throw std::invalid_argument("order: layer " + std::to_string(layer) + " stands twice");
        listed[layer] = 1;
    }
    for (std::int32_t layer = 0; layer < spec.layers; ++layer) {
        const Ids before = spec.before(layer), after = spec.after(layer);
        if (!listed[layer] && !std::equal(before.begin(), before.end(), after.begin()))
            throw std::invalid_argument("order: layer " + std::to_string(layer) +
                                        " changes and is missing");
    }
}

// Lists moves by chunk, layer and slot; source, round and buffer are filled in later.
std::vector<SlotMove> list_moves(const MigrationSpec& spec,
                                 const std::vector<std::int32_t>& chunks) {
    std::vector<SlotMove> moves;
    for (std::size_t chunk = 0; chunk + 1 < chunks.size(); ++chunk)
        for (std::int32_t i = chunks[chunk]; i < chunks[chunk + 1]; ++i) {
            const std::int32_t layer = spec.order[i];
            const Ids before = spec.before(layer), after = spec.after(layer);
            for (std::int32_t slot = 0; slot < spec.slots; ++slot)
                if (before[slot] != after[slot])
                    moves.push_back(
                        {layer, slot, after[slot], 0, static_cast<std::int32_t>(chunk), 0, 0});
        }
    return moves;
}

// Cuts the moves of a chunk, sorted by sender and receiver, into messages. message_of[i] is the
// message of move i, or kLocal.
std::vector<Message> cut_into_messages(const MigrationSpec& spec, Span<SlotMove> moves,
                                       std::vector<std::int32_t>& message_of) {
    std::vector<Message> messages;
    std::int32_t slots_left = 0;
    for (std::size_t i = 0; i < moves.size; ++i) {
        message_of[i] = kLocal;
        if (moves[i].round == kLocal) continue;
        const std::int32_t from = spec.rank_of(moves[i].source), to = spec.rank_of(moves[i].slot);
        const bool same = !messages.empty() && messages.back().source == from &&
                          messages.back().destination == to;
        if (!same || slots_left == 0) {
            messages.push_back({from, to, 0});
            slots_left = spec.message_slots;
        }
        --slots_left;
        message_of[i] = static_cast<std::int32_t>(messages.size()) - 1;
    }
    return messages;
}

// Gives the moves of a chunk their rounds, and sorts them as the plan lists them. Sorted by sender
// and receiver first, so that the moves of a message lie side by side.
std::int32_t schedule_chunk(const MigrationSpec& spec, Span<SlotMove> chunk) {
    std::sort(chunk.begin(), chunk.end(), [&](const SlotMove& a, const SlotMove& b) {
        return std::tuple(spec.rank_of(a.source), spec.rank_of(a.slot), a.layer, a.slot) <
               std::tuple(spec.rank_of(b.source), spec.rank_of(b.slot), b.layer, b.slot);
    });
    std::vector<std::int32_t> message_of(chunk.size);
    std::vector<Message> messages = cut_into_messages(spec, chunk, message_of);
    const std::int32_t rounds = assign_rounds(messages, spec.ranks);
    for (std::size_t i = 0; i < chunk.size; ++i)
        if (message_of[i] != kLocal) chunk[i].round = messages[message_of[i]].round;
    std::sort(chunk.begin(), chunk.end(), [&](const SlotMove& a, const SlotMove& b) {
        return std::tuple(spec.rank_of(a.slot), a.round, a.layer, a.slot) <
               std::tuple(spec.rank_of(b.slot), b.round, b.layer, b.slot);
    });
    return rounds;
}

void schedule_chunks(const MigrationSpec& spec, MigrationPlan& plan) {
    auto first = plan.moves.begin();
    for (std::int32_t chunk = 0; chunk + 1 < static_cast<std::int32_t>(plan.chunk_start.size());
         ++chunk) {
        const auto last = std::find_if(
            first, plan.moves.end(), [chunk](const SlotMove& move) { return move.chunk != chunk; });
        SlotMove* data = plan.moves.data() + (first - plan.moves.begin());
        plan.rounds_per_chunk.push_back(
            schedule_chunk(spec, {data, static_cast<std::size_t>(last - first)}));
        first = last;
    }
}

// Turns counts, stored one place late, into the starts of runs.
void to_start_positions(std::vector<std::int32_t>& counts) {
    std::partial_sum(counts.begin(), counts.end(), counts.begin());
}

void index_by_rank(const MigrationSpec& spec, MigrationPlan& plan) {
    const std::size_t places = plan.rounds_per_chunk.size() * spec.ranks;
    plan.receive_start.assign(places + 1, 0);
    plan.send_start.assign(places + 1, 0);
    const auto sender = [&](const SlotMove& move) {
        return move.chunk * spec.ranks + spec.rank_of(move.source);
    };
    for (std::size_t i = 0; i < plan.moves.size(); ++i) {
        const SlotMove& move = plan.moves[i];
        ++plan.receive_start[move.chunk * spec.ranks + spec.rank_of(move.slot) + 1];
        if (move.round == kLocal) continue;
        ++plan.send_start[sender(move) + 1];
        plan.sends.push_back(static_cast<std::int32_t>(i));
    }
    to_start_positions(plan.receive_start);
    to_start_positions(plan.send_start);
    std::sort(plan.sends.begin(), plan.sends.end(), [&](std::int32_t x, std::int32_t y) {
        const SlotMove &a = plan.moves[x], &b = plan.moves[y];
        return std::tuple(sender(a), a.round, a.layer, a.slot) <
               std::tuple(sender(b), b.round, b.layer, b.slot);
    });
}

// Buffers of a message are consecutive, because its moves are: it is unpacked in one run.
void assign_buffers(const MigrationSpec& spec, MigrationPlan& plan) {
    const auto places = static_cast<std::int32_t>(plan.receive_start.size()) - 1;
    for (std::int32_t place = 0; place < places; ++place) {
        const std::int32_t first = plan.receive_start[place], last = plan.receive_start[place + 1];
        const bool even = place / spec.ranks % 2 == 0;
        std::int32_t buffer = even ? 0 : spec.staging - (last - first);
        for (std::int32_t i = first; i < last; ++i) plan.moves[i].staging = buffer++;
    }
}

}  // namespace

MigrationPlan make_migration_plan(const MigrationSpec& spec) {
    require_order(spec);
    MigrationPlan plan;
    plan.chunk_start = group_into_chunks(spec);
    plan.moves = list_moves(spec, plan.chunk_start);
    choose_sources(InstalledSlots(spec), plan.moves);
    schedule_chunks(spec, plan);
    index_by_rank(spec, plan);
    assign_buffers(spec, plan);
    return plan;
}

}  // namespace equipoise
