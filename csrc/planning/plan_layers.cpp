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
using Task = std::function<void(Worker&, std::int64_t layer)>;

// What the threads share: the next layer, and what went wrong.
struct Shift {
    const Layers& layers;
    const Task& task;
    std::atomic<std::size_t> next{0};
    std::mutex failing;
    std::exception_ptr failure;
};

void work(Worker& worker, Shift& shift) {
    try {
        for (std::size_t at; (at = shift.next++) < shift.layers.size();)
            shift.task(worker, shift.layers[at]);
    } catch (...) {
        const std::lock_guard<std::mutex> alone(shift.failing);
        shift.failure = std::current_exception();
        shift.next = shift.layers.size();
    }
}

// A worker for each thread.
class Crew {
 public:
    Crew(const Request& request, const Answer& answer) {
        const std::int64_t threads = std::min<std::int64_t>(request.threads, request.layers);
        for (std::int64_t i = 0; i < threads; ++i)
            workers_.push_back(std::make_unique<Worker>(request, answer));
    }

    // Returns when all layers are done.
    void each(const Layers& layers, const Task& task) {
        Shift shift{layers, task, {}, {}, {}};
        std::vector<std::thread> others;
        others.reserve(workers_.size());
        try {
            for (std::size_t i = 1; i < std::min(workers_.size(), layers.size()); ++i)
                others.emplace_back(work, std::ref(*workers_[i]), std::ref(shift));
        } catch (const std::system_error&) {
            // No more threads are to be had: those that there are do it all.
        }
        if (!workers_.empty()) work(*workers_[0], shift);
        for (std::thread& other : others) other.join();
        if (shift.failure) std::rethrow_exception(shift.failure);
    }

 private:
    std::vector<std::unique_ptr<Worker>> workers_;
};

// A step waits for every layer in turn, so what counts is the mean over layers: as long as that
// meets the target, a layer that misses it a little is not worth a copy.
Layers worth_improving(const Request& request, const Answer& answer,
                       const std::vector<std::uint8_t>& stayed) {
    const std::int64_t* imbalance = answer.imbalance;
    const std::int64_t target = request.aims.target;
    Layers found;
    if (std::accumulate(imbalance, imbalance + request.layers, std::int64_t{0}) <=
        target * request.layers)
        return found;
    for (std::int64_t layer = 0; layer < request.layers; ++layer)
        if (stayed[layer] && imbalance[layer] > target && request.allowance[layer] > 0)
            found.push_back(layer);
    return found;
}

}  // namespace

void plan_layers(const Request& request, const Answer& answer) {
    Crew crew(request, answer);
    Layers all(request.layers);
    std::iota(all.begin(), all.end(), 0);
    if (request.policy != Policy::kIncremental || request.installed == nullptr)
        return crew.each(all, [](Worker& worker, auto layer) { worker.plan_anew(layer); });
    std::vector<std::uint8_t> stayed(request.layers);
    crew.each(all, [&](Worker& worker, auto layer) { stayed[layer] = worker.keep(layer); });
    crew.each(worth_improving(request, answer, stayed),
              [](Worker& worker, auto layer) { worker.improve(layer); });
}

}  // namespace equipoise
