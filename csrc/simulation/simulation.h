// The simulator of docs/design/request-balance.md: workers in lockstep, front ends with routers, a
// clock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "requests/router.h"
#include "simulation/prefill_alignment.h"
#include "simulation/simulated_worker.h"

namespace equipoise::requests {

struct SimulationSettings {
    PolicySettings policy;
    SimulatedWorkerSettings server;
    std::int64_t workers = 8;
    std::vector<std::int64_t> slots;  // requests that each worker runs at once
    std::int64_t front_ends = 1;
    // Seconds of a step: fixed + per_token * (largest work) + per_mean * (mean work); the work of a
    // worker is its load, and `prompt_weight` for each prompt token that it computes.
    double fixed = 0, per_token = 1e-7, per_mean = 0, prompt_weight = 0;
    double noise = 0;          // sigma of a lognormal factor on the work of each worker and step
    std::int64_t backlog = 0;  // requests that always wait; 0: requests arrive at their times
    double report_interval = 0;  // seconds between reports of workers; 0: before every decision
    double token_delay = 0;      // seconds between events told to front ends; 0: at every step
    double queue_timeout = 0;    // seconds after which a waiting request fails; 0: never
    std::int64_t cached_blocks = 0, block_tokens = 512;
    std::string prefill_rule;  // see prefill_alignment.h
    std::int64_t prefill_limit = 0;
    std::int64_t trajectory = 0;  // first steps of which the load of every worker is kept
    std::uint64_t seed = 0;
};

// What is recorded, by step.
struct StepRecord {
    std::vector<double> clock, seconds, ideal_seconds, largest, sum;
    std::vector<std::int64_t> tokens, active, waiting;
    std::vector<std::int64_t> loads;  // [trajectory][workers]
};

class Simulation {
 public:
    // `hashes` are the blocks of all prompts and `offsets` where each begins; both may be empty.
    Simulation(const SimulationSettings& settings, std::vector<SimulatedRequest> requests,
               std::vector<std::int64_t> hashes, std::vector<std::int64_t> offsets);

    Simulation(const Simulation&) = delete;
    Simulation& operator=(const Simulation&) = delete;

    // Runs up to `steps` steps. Returns whether requests are left. Throws RouterError if nothing
    // can go on, which is an error of the policy.
    bool run(std::int64_t steps);

    const std::vector<SimulatedRequest>& requests() const { return requests_; }
    const StepRecord& steps() const { return record_; }
    std::int64_t done() const { return done_; }
    // By front end, what its policy takes a prompt token to weigh by the times of steps.
    std::vector<double> fitted_prompt_weights() const;

 private:
    // A front end knows what its router was told, which may be late.
    struct FrontEnd {
        std::unique_ptr<Router> router;
        std::vector<WorkerEvent> events;       // not told yet
        std::vector<std::int32_t> request_of;  // by handle
    };

    Span<const std::int64_t> blocks(std::int32_t request) const;
    void arrive();
    void arrive(std::int32_t request);
    std::vector<std::int32_t> cached_tokens(std::int32_t request) const;
    void fail_impatient();
    void deliver_events();
    void deliver_events(FrontEnd& front, const WorkerEvent& event);
    void report();
    void decide();
    void admit();
    void align_prefill();
    std::int64_t queued() const;
    bool idle() const;
    bool skip_ahead();
    void step();
    void measure(double& largest, double& sum, double& seconds);
    void queue_events(const std::vector<WorkerEvent>& events);
    void fail(std::int32_t request);
    FrontEnd& front_end_of(std::int32_t request) {
        return front_ends_[request % front_ends_.size()];
    }

    SimulationSettings settings_;
    std::vector<SimulatedRequest> requests_;
    std::vector<std::int64_t> hashes_, offsets_;
    std::vector<SimulatedWorker> workers_;
    std::vector<FrontEnd> front_ends_;
    CounterRng rng_;
    StepRecord record_;
    std::vector<WorkerEvent> events_;  // of this step
    std::vector<double> work_;
    std::unique_ptr<PrefillAlignment> prefill_alignment_;
    std::vector<PrefillPermission> permissions_;  // by worker
    std::vector<std::int32_t> waiting_;  // requests that may time out, by arrival
    double clock_ = 0, next_report_ = 0, next_front_end_update_ = 0;
    std::int64_t next_ = 0;  // next request to arrive
    std::int64_t done_ = 0;
};

}  // namespace equipoise::requests
