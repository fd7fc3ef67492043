// Loads of all workers over the next steps, and the score that BR-H gives a request on one of them
// (arXiv 2605.06113): F = alpha (sum of gamma^h) D - beta sum of gamma^h (D - margin_h)+ .
#pragma once

#include <utility>
#include <vector>

#include "requests/output_lengths.h"
#include "requests/policy.h"
#include "requests/router_state.h"

namespace equipoise::requests {

class HorizonScore {
 public:
    HorizonScore(const PolicySettings& settings, const OutputLengths& lengths);

    // Projects every request to the step after which it is expected to have ended.
    void project(const RouterState& state);
    // A request of this size joins the worker; by design it counts as constant.
    void add(std::size_t worker, std::int64_t size);
    // Prepares `score` for this worker.
    void select_worker(std::size_t worker);
    double score(std::int64_t size) const;

 private:
    double ends_in(const RouterState& state, const Request& request) const;
    void project(const RouterState& state, std::size_t worker);
    double* loads(std::size_t worker) { return &loads_[worker * (steps_ + 1)]; }

    std::size_t steps_;
    double alpha_, beta_;
    bool oracle_;
    const OutputLengths& lengths_;
    std::vector<double> weights_;                     // gamma^h
    std::vector<double> loads_, envelope_;            // [worker][h], [h]
    std::vector<std::pair<double, double>> margins_;  // (margin, weight), ascending
    std::vector<double> weight_sums_, margin_sums_;   // of those before
    std::vector<double> ended_count_, ended_weight_;  // scratch, by step
    double total_ = 0, weight_ = 0;                   // of all steps; of overflow
};

}  // namespace equipoise::requests
