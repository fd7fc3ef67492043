#include "migration/source_choice.h"

#include <algorithm>

#include "migration/sender_balance.h"

namespace equipoise {
namespace {

void choose_source(const InstalledSlots& installed, SlotMove& move, SendCounts& sent) {
    const MigrationSpec& spec = installed.spec();
    const Ids sources = installed.sources_for(move);
    const auto sent_less = [&](std::int32_t a, std::int32_t b) {
        return sent[spec.rank_of(a)] < sent[spec.rank_of(b)];
    };
    move.source = *std::min_element(sources.begin(), sources.end(), sent_less);
    const bool local = spec.rank_of(move.source) == spec.rank_of(move.slot);
    move.round = local ? kLocal : 0;
    sent[spec.rank_of(move.source)] += !local;
}

// Returns the most moves that one rank receives. Rounds are as many as the busiest end has
// messages, so nothing is gained by fewer sends than that.
std::int32_t max_received(const MigrationSpec& spec, Span<SlotMove> moves) {
    std::vector<std::int32_t> received(spec.ranks);
    for (const SlotMove& move : moves) received[spec.rank_of(move.slot)] += move.round != kLocal;
    return *std::max_element(received.begin(), received.end());
}

// The ceiling keeps what was reached over all moves: no rank's total rises above the present
// maximum.
void balance_chunks(const InstalledSlots& installed, std::vector<SlotMove>& moves,
                    SendCounts& sent) {
    const std::int32_t ceiling = *std::max_element(sent.begin(), sent.end());
    for (std::size_t first = 0, last = 0; first < moves.size(); first = last) {
        while (last < moves.size() && moves[last].chunk == moves[first].chunk) ++last;
        const Span<SlotMove> chunk{moves.data() + first, last - first};
        SenderBalance(installed, chunk, sent, ceiling)
            .lower_to(max_received(installed.spec(), chunk));
    }
}

}  // namespace

void choose_sources(const InstalledSlots& installed, std::vector<SlotMove>& moves) {
    SendCounts sent(installed.spec().ranks);
    for (SlotMove& move : moves) choose_source(installed, move, sent);
    SenderBalance(installed, {moves.data(), moves.size()}, sent, INT32_MAX).lower_to(0);
    balance_chunks(installed, moves, sent);
}

}  // namespace equipoise
