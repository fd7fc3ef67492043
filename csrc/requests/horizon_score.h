// Projects the loads of all workers over the next steps, and scores a request on one of them as
// BR-H does (arXiv 2605.06113): F = alpha (sum of gamma^h) D - beta sum of gamma^h (D - margin_h)+
// .
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

    // Projects all workers: every request keeps its weight until it is expected to end. That it
    // grows by a token a step is left out in the published code too, and makes decisions worse.
    void project(const RouterState& state);
    // A request of this size joins the worker. Its size is taken as constant, as in the paper.
    void add(std::size_t worker, std::int64_t size);
    // Prepares `score` for a worker, so that a score costs O(log steps) for each of many requests.
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
    std::vector<double> weight_sums_, margin_sums_;   // prefix sums over margins_
    std::vector<double> ended_weight_;                // scratch, by step
    double total_ = 0;                                // sum of weights_
    double weight_ = 0;                               // of overflow: beta, or the workers
};

}  // namespace equipoise::requests
