#include "migration/source_choice.h"

#include <algorithm>

#include "migration/sender_balance.h"

namespace equipoise {
namespace {

void choose(const Holders& holders, Move& move, Sent& sent) {
    const Cargo& cargo = holders.cargo();
    const Ids choices = holders.choices(move);
    const auto idler = [&](std::int32_t a, std::int32_t b) {
        return sent[cargo.rank_of(a)] < sent[cargo.rank_of(b)];
    };
    move.source = *std::min_element(choices.begin(), choices.end(), idler);
    const bool local = cargo.rank_of(move.source) == cargo.rank_of(move.slot);
    move.round = local ? kLocal : 0;
    sent[cargo.rank_of(move.source)] += !local;
}

// The most that one rank receives: with fewer sends than that nothing is gained.
std::int32_t most_received(const Cargo& cargo, Span<Move> moves) {
    std::vector<std::int32_t> received(cargo.ranks);
    for (const Move& move : moves) received[cargo.rank_of(move.slot)] += move.round != kLocal;
    return *std::max_element(received.begin(), received.end());
}

void relieve_lots(const Holders& holders, std::vector<Move>& moves, Sent& sent) {
    const std::int32_t ceiling = *std::max_element(sent.begin(), sent.end());
    for (std::size_t first = 0, last = 0; first < moves.size(); first = last) {
        while (last < moves.size() && moves[last].lot == moves[first].lot) ++last;
        const Span<Move> lot{moves.data() + first, last - first};
        Relief(holders, lot, sent, ceiling).lower_to(most_received(holders.cargo(), lot));
    }
}

}  // namespace

void choose_sources(const Holders& holders, std::vector<Move>& moves) {
    Sent sent(holders.cargo().ranks);
    for (Move& move : moves) choose(holders, move, sent);
    Relief(holders, {moves.data(), moves.size()}, sent, INT32_MAX).lower_to(0);
    relieve_lots(holders, moves, sent);
}

}  // namespace equipoise
