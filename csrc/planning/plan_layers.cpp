#include "planning/plan_layers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>

#include "planning/layer_planner.h"

namespace equipoise {
namespace {

using Layers = std::vector<std::int64_t>;
using LayerTask = std::function<void(LayerPlanner&, std::int64_t layer)>;

// What the threads share: the next layer, and an exception of one of them.
struct WorkList {
    const Layers& layers;
    const LayerTask& task;
    // Threads take layers one by one, because layers differ in time. The counter is the only thing
    // that they contend for; results are ordered by join().
    std::atomic<std::size_t> next{0};
    std::mutex failure_mutex;
    std::exception_ptr failure;
};

void run_thread(LayerPlanner& planner, WorkList& list) {
    try {
        for (std::size_t at; (at = list.next++) < list.layers.size();)
            list.task(planner, list.layers[at]);
    } catch (...) {
        const std::lock_guard<std::mutex> alone(list.failure_mutex);
        list.failure = std::current_exception();
        list.next = list.layers.size();  // the others stop after their layer
    }
}

// One planner per thread: a planner holds the scratch memory of a layer.
class PlannerThreads {
 public:
    PlannerThreads(const PlanRequest& request, const PlanResult& result) {
        const std::int64_t threads = std::min<std::int64_t>(request.threads, request.layers);
        for (std::int64_t i = 0; i < threads; ++i)
            planners_.push_back(std::make_unique<LayerPlanner>(request, result));
    }

    // Runs the task for each layer and returns when all are done. The calling thread works too.
    void for_each(const Layers& layers, const LayerTask& task) {
        WorkList list{layers, task, {}, {}, {}};
        std::vector<std::thread> others;
        others.reserve(planners_.size());
        try {
            for (std::size_t i = 1; i < std::min(planners_.size(), layers.size()); ++i)
                others.emplace_back(run_thread, std::ref(*planners_[i]), std::ref(list));
        } catch (const std::system_error&) {
            // The system has no more threads: those that there are plan all layers.
        }
        if (!planners_.empty()) run_thread(*planners_[0], list);
        for (std::thread& other : others) other.join();
        if (list.failure) std::rethrow_exception(list.failure);
    }

 private:
    std::vector<std::unique_ptr<LayerPlanner>> planners_;
};

// A step waits for every layer in turn, so its time follows the mean over layers: while that meets
// the target, a layer that misses it by little is not worth a copy.
Layers layers_worth_improving(const PlanRequest& request, const PlanResult& result,
                              const std::vector<std::uint8_t>& kept) {
    const std::int64_t* imbalance = result.imbalance;
    const std::int64_t target = request.options.target;
    Layers found;
    if (std::accumulate(imbalance, imbalance + request.layers, std::int64_t{0}) <=
        target * request.layers)
        return found;
    for (std::int64_t layer = 0; layer < request.layers; ++layer)
        if (kept[layer] && imbalance[layer] > target && request.allowance[layer] > 0)
            found.push_back(layer);
    return found;
}

}  // namespace

void plan_layers(const PlanRequest& request, const PlanResult& result) {
    PlannerThreads threads(request, result);
    Layers all(request.layers);
    std::iota(all.begin(), all.end(), 0);
    if (request.policy != PlanPolicy::kIncremental || request.installed == nullptr)
        return threads.for_each(
            all, [](LayerPlanner& planner, auto layer) { planner.plan_anew(layer); });
    std::vector<std::uint8_t> kept(request.layers);
    threads.for_each(all,
                     [&](LayerPlanner& planner, auto layer) { kept[layer] = planner.keep(layer); });
    threads.for_each(layers_worth_improving(request, result, kept),
                     [](LayerPlanner& planner, auto layer) { planner.improve(layer); });
}

}  // namespace equipoise
