// The policies, by name. The formulas are the published ones; each stands with its source where it
// is implemented.
#pragma once

#include <memory>
#include <string>

#include "requests/router_state.h"

namespace equipoise::requests {

struct PolicySettings {
    std::string name = "fit";
    // `queue`: policies that push bind at once, also to a full worker, as published. `hold`: they
    // choose among workers that are not full, and a request waits while there is none.
    std::string when_full = "queue";
    std::string predictor = "survival";  // of brh: survival or oracle
    std::int64_t front_ends = 1;         // that share these workers
    std::int64_t front_end = 0;          // which of them this is
    std::uint64_t seed = 0;

    // br0 and brh: how many free slots in all it takes to serve one by one, how many waiting
    // requests are looked at for a subset and for one.
    std::int64_t greedy_slots = 1, subset = 4, candidates = 1024;
    // brh: steps ahead, weight of load, of overflow, and of a step against the one before.
    std::int64_t horizon = 80;
    // `beta` 0: as many as there are workers, with which horizon 0 is br0.
    double alpha = 1.0, beta = 0.0, gamma = 0.96;
    // fast_phi: points of the output distribution at which overflow is looked at.
    std::int64_t points = 5;
    // fit: waiting requests that may be chosen from; what a decision of waiting is worth, in
    // tokens; how far above the mean load a worker still takes requests, as a part of it; what a
    // prompt token costs that has to be computed, in loads of one step; and up to how many times
    // what a prompt costs that is computed alone may be lost while requests wait for each other.
    std::int64_t window = 32;
    double ageing = 16.0, slack = 0.07, prompt_weight = 0.0, gather = 1.0;
};

class Policy {
 public:
    virtual ~Policy() = default;

    // Binds what is to be bound now, by `fleet.bind`; something is in the pool.
    virtual void dispatch(RouterState& state) = 0;
    // Whether it binds to full workers too.
    virtual bool queues() const { return false; }
    // A request ended by itself, after `made` tokens.
    virtual void finished(std::int64_t made) { static_cast<void>(made); }
};

// Raises RouterError for an unknown name or a setting that makes no sense.
std::unique_ptr<Policy> make_policy(const PolicySettings& settings, std::size_t workers);

std::unique_ptr<Policy> make_counting_policy(const PolicySettings& settings, std::size_t workers);
std::unique_ptr<Policy> make_prefix_aware_policy(const PolicySettings& settings,
                                                 std::size_t workers);
std::unique_ptr<Policy> make_balance_route(const PolicySettings& settings);
std::unique_ptr<Policy> make_fast_phi(const PolicySettings& settings);
std::unique_ptr<Policy> make_water_level_fit(const PolicySettings& settings);

}  // namespace equipoise::requests
