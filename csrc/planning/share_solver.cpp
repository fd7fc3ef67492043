#include "planning/share_solver.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace equipoise {
namespace {

// The replicas of one expert on one rank.
struct Bin {
    std::int32_t rank;
    std::int32_t copies;
    std::int64_t load;
};

// Bins by expert, then by ascending rank.
struct WaterFill {
    std::vector<std::int32_t> first;  // [experts + 1], first bin of each expert
    std::vector<Bin> bins;
    std::vector<std::int64_t> ranks;                           // load of each rank
    std::vector<std::pair<std::int64_t, std::int32_t>> order;  // scratch: load of others, bin
};

WaterFill start_evenly(Counts counts, Ids start, Ids replicas, std::int64_t ranks) {
    WaterFill fill;
    const auto per_rank = static_cast<std::int32_t>(replicas.size / ranks);
    fill.first.reserve(start.size);
    fill.bins.reserve(replicas.size);
    fill.ranks.assign(ranks, 0);
    for (std::size_t e = 0; e < counts.size; ++e) {
        fill.first.push_back(static_cast<std::int32_t>(fill.bins.size()));
        const std::int64_t total = counts[e] * kShareOne, copies = start[e + 1] - start[e];
        std::int64_t remainder = total % copies;
        for (std::int32_t i = start[e]; i < start[e + 1]; ++i) {
            const std::int32_t rank = replicas[i] / per_rank;
            if (i == start[e] || fill.bins.back().rank != rank) fill.bins.push_back({rank, 0, 0});
            fill.bins.back().copies += 1;
            fill.bins.back().load += total / copies + remainder;
            fill.ranks[rank] += total / copies + remainder;
            remainder = 0;
        }
    }
    fill.first.push_back(static_cast<std::int32_t>(fill.bins.size()));
    return fill;
}

struct WaterLevel {
    std::int64_t height;
    std::int64_t remainder;
    std::size_t filled;  // how many entries of `order` are below the height
};

WaterLevel find_level(const WaterFill& fill, std::int64_t total) {
    std::int64_t volume = total;
    std::size_t filled = 0;
    while (filled < fill.order.size()) {
        const std::int64_t floor = fill.order[filled].first;
        // In 128 bits: a load near 2^62 times the number of bins does not fit into 64.
        if (filled > 0 && static_cast<__int128>(floor) * filled >= volume) break;
        volume += floor;
        ++filled;
    }
    const auto width = static_cast<std::int64_t>(filled);
    return {volume / width, volume % width, filled};
}

// Refills the bins of one expert. Returns whether any of them changed.
bool refill_expert(WaterFill& fill, std::int32_t first, std::int32_t last) {
    std::int64_t total = 0;
    fill.order.clear();
    for (std::int32_t b = first; b < last; ++b) {
        total += fill.bins[b].load;
        fill.order.push_back({fill.ranks[fill.bins[b].rank] - fill.bins[b].load, b});
    }
    std::sort(fill.order.begin(), fill.order.end());
    WaterLevel level = find_level(fill, total);
    // Back to the order of ranks: if the remainder went by load, it would change ranks in every
    // sweep, and no sweep would be the last.
    std::sort(fill.order.begin(), fill.order.begin() + level.filled,
              [](const auto& a, const auto& b) { return a.second < b.second; });
    bool changed = false;
    for (std::size_t i = 0; i < fill.order.size(); ++i) {
        const auto [other, b] = fill.order[i];
        std::int64_t load = 0;
        if (i < level.filled) load = level.height - other + (level.remainder-- > 0 ? 1 : 0);
        changed |= load != fill.bins[b].load;
        fill.bins[b].load = load;
        fill.ranks[fill.bins[b].rank] = other + load;
    }
    return changed;
}

bool sweep(WaterFill& fill, Counts counts) {
    bool changed = false;
    for (std::size_t e = 0; e < counts.size; ++e)
        // With one bin there is nothing to choose.
        if (counts[e] > 0 && fill.first[e + 1] - fill.first[e] > 1)
            changed |= refill_expert(fill, fill.first[e], fill.first[e + 1]);
    return changed;
}

void share_evenly(Span<std::int32_t> shares) {
    const auto copies = static_cast<std::int32_t>(shares.size);
    for (std::int32_t i = 0; i < copies; ++i)
        shares[i] = kShareOne / copies + (i < kShareOne % copies ? 1 : 0);
}

struct Fraction {
    std::int64_t remainder;  // of a division by copies * count, which differs from bin to bin
    std::int64_t copies;
    std::int32_t replica;
};

// Rounds the bins of one expert to shares of its `count` tokens.
void round_shares(const Bin* bin, std::int64_t count, Span<std::int32_t> shares,
                  std::vector<Fraction>& remainders) {
    std::int32_t missing = kShareOne;
    std::int32_t replica = 0;
    remainders.clear();
    for (; replica < static_cast<std::int32_t>(shares.size); ++bin) {
        const std::int64_t whole = count * bin->copies;
        for (std::int32_t c = 0; c < bin->copies; ++c, ++replica) {
            shares[replica] = static_cast<std::int32_t>(bin->load / whole);
            missing -= shares[replica];
            remainders.push_back({bin->load % whole, bin->copies, replica});
        }
    }
    // Remainders are compared as fractions, by cross multiplication.
    std::sort(remainders.begin(), remainders.end(), [](const Fraction& a, const Fraction& b) {
        const auto left = static_cast<__int128>(a.remainder) * b.copies;
        const auto right = static_cast<__int128>(b.remainder) * a.copies;
        return left != right ? left > right : a.replica < b.replica;
    });
    for (std::int32_t i = 0; i < missing; ++i) ++shares[remainders[i].replica];
}

Span<std::int32_t> run_of(Span<std::int32_t> shares, Ids start, std::size_t expert) {
    return {shares.data + start[expert],
            static_cast<std::size_t>(start[expert + 1] - start[expert])};
}

std::int64_t peak(Counts counts, Ids start, Ids replicas, Ids shares, std::size_t ranks) {
    std::vector<std::int64_t> loads(ranks, 0);
    const auto per_rank = static_cast<std::int32_t>(replicas.size / ranks);
    for (std::size_t e = 0; e < counts.size; ++e)
        for (std::int32_t i = start[e]; i < start[e + 1]; ++i)
            loads[replicas[i] / per_rank] += counts[e] * shares[i];
    return *std::max_element(loads.begin(), loads.end());
}

}  // namespace

void solve_shares(Counts counts, Ids start, Ids replicas, std::int64_t ranks, std::int64_t sweeps,
                  Span<std::int32_t> shares) {
    WaterFill fill = start_evenly(counts, start, replicas, ranks);
    for (std::int64_t i = 0; i < sweeps && sweep(fill, counts); ++i) {
    }
    for (std::size_t e = 0; e < counts.size; ++e) share_evenly(run_of(shares, start, e));
    const std::vector<std::int32_t> even(shares.begin(), shares.end());
    std::vector<Fraction> remainders;
    for (std::size_t e = 0; e < counts.size; ++e) {
        const Span<std::int32_t> run = run_of(shares, start, e);
        if (counts[e] > 0 && run.size > 1)
            round_shares(&fill.bins[fill.first[e]], counts[e], run, remainders);
    }
    const Ids solved{shares.data, shares.size};
    if (peak(counts, start, replicas, solved, ranks) >
        peak(counts, start, replicas, {even.data(), even.size()}, ranks))
        std::copy(even.begin(), even.end(), shares.begin());
}

void accumulate_replica_shares(Ids start, Span<std::int32_t> shares) {
    for (std::size_t e = 0; e + 1 < start.size; ++e)
        for (std::int32_t i = start[e] + 1; i < start[e + 1]; ++i) shares[i] += shares[i - 1];
}

}  // namespace equipoise
