#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/numpy_arrays.h"
#include "simulation/simulation.h"

namespace equipoise {
namespace {

using namespace requests;
using namespace nb::literals;

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> copied(const std::vector<T>& values) {
    auto* kept = new std::vector<T>(values);
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return {kept->data(), {kept->size()}, owner};
}

// One member of every request, as T.
template <typename T, typename Member>
nb::ndarray<nb::numpy, T, nb::ndim<1>> column(const Simulation& simulation, Member member) {
    std::vector<T> values;
    values.reserve(simulation.requests().size());
    for (const SimulatedRequest& request : simulation.requests())
        values.push_back(static_cast<T>(request.*member));
    return copied(values);
}

nb::dict request_columns(const Simulation& simulation) {
    nb::dict out;
    out["arrival"] = column<double>(simulation, &SimulatedRequest::arrival);
    out["admitted"] = column<double>(simulation, &SimulatedRequest::admitted);
    out["first"] = column<double>(simulation, &SimulatedRequest::first);
    out["end"] = column<double>(simulation, &SimulatedRequest::end);
    out["worker"] = column<std::int64_t>(simulation, &SimulatedRequest::worker);
    out["admitted_step"] = column<std::int64_t>(simulation, &SimulatedRequest::admitted_step);
    out["preemptions"] = column<std::int64_t>(simulation, &SimulatedRequest::preemptions);
    std::vector<std::int64_t> failed;
    for (const SimulatedRequest& request : simulation.requests())
        failed.push_back(request.fate == RequestFate::failed);
    out["failed"] = copied(failed);
    return out;
}

nb::dict step_columns(const Simulation& simulation) {
    const StepRecord& record = simulation.steps();
    nb::dict out;
    out["clock"] = copied(record.clock);
    out["seconds"] = copied(record.seconds);
    out["ideal_seconds"] = copied(record.ideal_seconds);
    out["largest"] = copied(record.largest);
    out["sum"] = copied(record.sum);
    out["tokens"] = copied(record.tokens);
    out["active"] = copied(record.active);
    out["waiting"] = copied(record.waiting);
    out["loads"] = copied(record.loads);
    return out;
}

std::vector<SimulatedRequest> read_requests(nb::handle prompts, nb::handle outputs,
                                            nb::handle arrivals) {
    const CountArray sizes("prompts", prompts, 1), lengths("outputs", outputs, 1);
    const Array<const double> times("arrivals", arrivals, 1);
    require_size("outputs", lengths.size(), sizes.size());
    require_size("arrivals", times.size(), sizes.size());
    std::vector<SimulatedRequest> requests(sizes.size());
    for (std::size_t i = 0; i < requests.size(); ++i) {
        requests[i].prompt = sizes.view()[i];
        requests[i].output = lengths.view()[i];
        requests[i].arrival = times.view()[i];
        require_range("prompts", requests[i].prompt, 1, INT32_MAX);
        require_range("outputs", requests[i].output, 1, INT32_MAX);
    }
    return requests;
}

void construct(Simulation* self, const SimulationSettings& settings, nb::handle prompts,
               nb::handle outputs, nb::handle arrivals, nb::handle hashes, nb::handle offsets) {
    require_range("workers", settings.workers, 1, 65536);
    require_range("front_ends", settings.front_ends, 1, 1024);
    const CountArray flat("hashes", hashes, 1), ends("offsets", offsets, 1);
    std::vector<SimulatedRequest> requests = read_requests(prompts, outputs, arrivals);
    if (ends.size() > 0) require_size("offsets", ends.size(), requests.size() + 1);
    new (self) Simulation(settings, std::move(requests),
                          std::vector<std::int64_t>(flat.view().begin(), flat.view().end()),
                          std::vector<std::int64_t>(ends.view().begin(), ends.view().end()));
}

void bind_settings(nb::module_& m) {
    using S = SimulationSettings;
    nb::class_<SimulatedWorkerSettings>(m, "ServerSettings",
                                        "What csrc/simulation/simulated_worker.h says.")
        .def(nb::init<>())
        .def_rw("room", &SimulatedWorkerSettings::room)
        .def_rw("prefill_chunk", &SimulatedWorkerSettings::prefill_chunk)
        .def_rw("drafts", &SimulatedWorkerSettings::drafts)
        .def_rw("acceptance", &SimulatedWorkerSettings::acceptance);
    nb::class_<S>(m, "SimulationSettings", "What csrc/simulation/simulation.h says.")
        .def(nb::init<>())
        .def_rw("policy", &S::policy)
        .def_rw("server", &S::server)
        .def_rw("workers", &S::workers)
        .def_rw("slots", &S::slots)
        .def_rw("front_ends", &S::front_ends)
        .def_rw("fixed", &S::fixed)
        .def_rw("per_token", &S::per_token)
        .def_rw("per_mean", &S::per_mean)
        .def_rw("prompt_weight", &S::prompt_weight)
        .def_rw("noise", &S::noise)
        .def_rw("backlog", &S::backlog)
        .def_rw("report_interval", &S::report_interval)
        .def_rw("token_delay", &S::token_delay)
        .def_rw("queue_timeout", &S::queue_timeout)
        .def_rw("cached_blocks", &S::cached_blocks)
        .def_rw("block_tokens", &S::block_tokens)
        .def_rw("prefill_rule", &S::prefill_rule)
        .def_rw("prefill_limit", &S::prefill_limit)
        .def_rw("trajectory", &S::trajectory)
        .def_rw("seed", &S::seed);
}

}  // namespace

void bind_simulation(nb::module_& m) {
    bind_settings(m);
    nb::class_<Simulation>(m, "Simulation", "Workers in lockstep behind front ends with policies.")
        .def("__init__", &construct, "settings"_a, "prompts"_a, "outputs"_a, "arrivals"_a,
             "hashes"_a, "offsets"_a)
        .def("run", &Simulation::run, "steps"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("done", &Simulation::done)
        .def("fitted_prompt_weights", &Simulation::fitted_prompt_weights)
        .def("jobs", &request_columns)
        .def("steps", &step_columns);
}

}  // namespace equipoise
