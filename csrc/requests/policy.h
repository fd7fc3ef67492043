// What every policy is given, and how one is made by its name. Formulas are as published; the
// source of each stands where it is implemented.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "requests/router_state.h"

namespace equipoise::requests {

struct PolicySettings {
    std::string name = "fit";
    // Of policies that bind at once. `queue`: also to a full worker, as published. `hold`: only to
    // workers that are not full, and requests wait while there is none.
    std::string when_full = "queue";
    std::string predictor = "survival";  // of brh: survival or oracle
    std::int64_t front_ends = 1;         // front ends that share these workers
    std::int64_t front_end = 0;          // which of them this is
    std::uint64_t seed = 0;
    bool lockstep = true;  // workers meet at a barrier in each step: decide when each is over

    // br0 and brh: requests are bound one by one while more slots than `greedy_slots` are free,
    // else in subsets. `subset` and `candidates`: how many waiting requests are looked at for
    // either.
    std::int64_t greedy_slots = 1, subset = 4, candidates = 1024;
    // brh: steps ahead; weights of load, of overflow, and of a step relative to the one before.
    std::int64_t horizon = 80;
    // `beta` 0 stands for the number of workers, with which horizon 0 is br0.
    double alpha = 1.0, beta = 0.0, gamma = 0.96;
    // fast_phi: points of the output distribution at which overflow is computed.
    std::int64_t points = 5;
    // fit. `window`: waiting requests that it chooses from. `wait_bonus`: what a step of waiting is
    // worth, in mean sizes of the requests that wait. `slack`: how far above the mean load a worker
    // still takes requests, in standard deviations of the loads. `overshoot`: what a token above
    // the level costs, in tokens below it and times the number of workers, all of which wait for
    // the fullest; 1 at least, and at the fullest the number of workers at least. `prompt_weight`: KV tokens that are read in the time of computing
    // one prompt token; without it, fitted to the times of steps. `prefill_wait`: how many times
    // the cost of a prompt that is computed alone may be lost while requests wait for each other.
    std::int64_t window = 1024;
    double wait_bonus = 0.0125, slack = 1.5, overshoot = 0.1, prefill_wait = 1.0;
    std::optional<double> prompt_weight;
};

class Policy {
 public:
    virtual ~Policy() = default;

    // Binds requests of the pool by `state.bind`. Called only if the pool is not empty.
    virtual void dispatch(RouterState& state) = 0;
    // Whether it also binds to full workers.
    virtual bool queues() const { return false; }
    // A request ended by itself, with `made` tokens.
    virtual void finished(std::int64_t made) { static_cast<void>(made); }
};

// Throws RouterError for an unknown name or a setting that makes no sense.
std::unique_ptr<Policy> make_policy(const PolicySettings& settings, std::size_t workers);

// Each returns nullptr if it does not know the name.
std::unique_ptr<Policy> make_counting_policy(const PolicySettings& settings, std::size_t workers);
std::unique_ptr<Policy> make_prefix_aware_policy(const PolicySettings& settings,
                                                 std::size_t workers);
std::unique_ptr<Policy> make_balance_route(const PolicySettings& settings);
std::unique_ptr<Policy> make_fast_phi(const PolicySettings& settings);
std::unique_ptr<Policy> make_water_level_fit(const PolicySettings& settings);

}  // namespace equipoise::requests
