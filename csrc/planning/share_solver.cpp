#include "planning/share_solver.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace equipoise {
namespace {

struct Bin {
    std::int32_t rank;
    std::int32_t copies;
    std::int64_t load;
};

// The state of one solution: bins by expert, then by ascending rank.
struct Tank {
    std::vector<std::int32_t> first;  // [experts + 1], first bin of each expert
    std::vector<Bin> bins;
    std::vector<std::int64_t> ranks;                           // load of each rank
    std::vector<std::pair<std::int64_t, std::int32_t>> order;  // scratch: other load, bin
};

Tank make_tank(Counts counts, Ids start, Ids replicas, std::int64_t ranks) {
    Tank tank;
    const auto per_rank = static_cast<std::int32_t>(replicas.size / ranks);
    tank.first.reserve(start.size);
    tank.bins.reserve(replicas.size);
    tank.ranks.assign(ranks, 0);
    for (std::size_t e = 0; e < counts.size; ++e) {
        tank.first.push_back(static_cast<std::int32_t>(tank.bins.size()));
        const std::int64_t total = counts[e] * kShareOne, copies = start[e + 1] - start[e];
        std::int64_t rest = total % copies;
        for (std::int32_t i = start[e]; i < start[e + 1]; ++i) {
            const std::int32_t rank = replicas[i] / per_rank;
            if (i == start[e] || tank.bins.back().rank != rank) tank.bins.push_back({rank, 0, 0});
            tank.bins.back().copies += 1;
            tank.bins.back().load += total / copies + rest;
            tank.ranks[rank] += total / copies + rest;
            rest = 0;
        }
    }
    tank.first.push_back(static_cast<std::int32_t>(tank.bins.size()));
    return tank;
}

struct Level {
    std::int64_t height;
    std::int64_t rest;
    std::size_t filled;  // how many entries of `order` are under water
};

Level find_level(const Tank& tank, std::int64_t total) {
    std::int64_t volume = total;
    std::size_t filled = 0;
    while (filled < tank.order.size()) {
        const std::int64_t floor = tank.order[filled].first;
        if (filled > 0 && static_cast<__int128>(floor) * filled >= volume) break;
        volume += floor;
        ++filled;
    }
    const auto width = static_cast<std::int64_t>(filled);
    return {volume / width, volume % width, filled};
}

// Returns whether any bin changed.
bool refill(Tank& tank, std::int32_t first, std::int32_t last) {
    std::int64_t total = 0;
    tank.order.clear();
    for (std::int32_t b = first; b < last; ++b) {
        total += tank.bins[b].load;
        tank.order.push_back({tank.ranks[tank.bins[b].rank] - tank.bins[b].load, b});
    }
    std::sort(tank.order.begin(), tank.order.end());
    Level level = find_level(tank, total);
    // By bin, that is by rank: the remainder must not follow the loads or it would wander forever.
    std::sort(tank.order.begin(), tank.order.begin() + level.filled,
              [](const auto& a, const auto& b) { return a.second < b.second; });
    bool changed = false;
    for (std::size_t i = 0; i < tank.order.size(); ++i) {
        const auto [other, b] = tank.order[i];
        std::int64_t load = 0;
        if (i < level.filled) load = level.height - other + (level.rest-- > 0 ? 1 : 0);
        changed |= load != tank.bins[b].load;
        tank.bins[b].load = load;
        tank.ranks[tank.bins[b].rank] = other + load;
    }
    return changed;
}

bool sweep(Tank& tank, Counts counts) {
    bool changed = false;
    for (std::size_t e = 0; e < counts.size; ++e)
        if (counts[e] > 0 && tank.first[e + 1] - tank.first[e] > 1)
            changed |= refill(tank, tank.first[e], tank.first[e + 1]);
    return changed;
}

void share_evenly(Span<std::int32_t> shares) {
    const auto copies = static_cast<std::int32_t>(shares.size);
    for (std::int32_t i = 0; i < copies; ++i)
        shares[i] = kShareOne / copies + (i < kShareOne % copies ? 1 : 0);
}

struct Fraction {
    std::int64_t rest;  // of a division by copies * count
    std::int64_t copies;
    std::int32_t replica;
};

// Rounds the bins of one expert to shares of its `count` tokens.
void round_shares(const Bin* bin, std::int64_t count, Span<std::int32_t> shares,
                  std::vector<Fraction>& rests) {
    std::int32_t missing = kShareOne;
    std::int32_t replica = 0;
    rests.clear();
    for (; replica < static_cast<std::int32_t>(shares.size); ++bin) {
        const std::int64_t whole = count * bin->copies;
        for (std::int32_t c = 0; c < bin->copies; ++c, ++replica) {
            shares[replica] = static_cast<std::int32_t>(bin->load / whole);
            missing -= shares[replica];
            rests.push_back({bin->load % whole, bin->copies, replica});
        }
    }
    std::sort(rests.begin(), rests.end(), [](const Fraction& a, const Fraction& b) {
        const auto left = static_cast<__int128>(a.rest) * b.copies;
        const auto right = static_cast<__int128>(b.rest) * a.copies;
        return left != right ? left > right : a.replica < b.replica;
    });
    for (std::int32_t i = 0; i < missing; ++i) ++shares[rests[i].replica];
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
    Tank tank = make_tank(counts, start, replicas, ranks);
    for (std::int64_t i = 0; i < sweeps && sweep(tank, counts); ++i) {
    }
    for (std::size_t e = 0; e < counts.size; ++e) share_evenly(run_of(shares, start, e));
    const std::vector<std::int32_t> even(shares.begin(), shares.end());
    std::vector<Fraction> rests;
    for (std::size_t e = 0; e < counts.size; ++e) {
        const Span<std::int32_t> run = run_of(shares, start, e);
        if (counts[e] > 0 && run.size > 1)
            round_shares(&tank.bins[tank.first[e]], counts[e], run, rests);
    }
    const Ids solved{shares.data, shares.size};
    if (peak(counts, start, replicas, solved, ranks) >
        peak(counts, start, replicas, {even.data(), even.size()}, ranks))
        std::copy(even.begin(), even.end(), shares.begin());
}

void accumulate_runs(Ids start, Span<std::int32_t> shares) {
    for (std::size_t e = 0; e + 1 < start.size; ++e)
        for (std::int32_t i = start[e] + 1; i < start[e + 1]; ++i) shares[i] += shares[i - 1];
}

}  // namespace equipoise
