#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "requests/router.h"

namespace equipoise {
namespace {

using namespace requests;
namespace nb = nanobind;
using namespace nb::literals;
// Most tokens of a prompt, or of a step of a request: 2^31 requests of as many tokens sum to less
// than 2^63.
constexpr std::int64_t kMostTokens = INT32_MAX;
using Pairs = std::vector<std::pair<std::int32_t, std::int32_t>>;

WorkerState state_of(const std::string& name) {
    if (name == "serving") return WorkerState::serving;
    if (name == "draining") return WorkerState::draining;
    throw RouterError("no worker is put into the state " + name + " this way");
}

Request checked_request(const Router& router, std::int64_t size, std::int32_t worker,
                        std::vector<std::int32_t> hits, std::int64_t expected) {
    if (size < 1 || size > kMostTokens)
        throw RequestRefused("size: expected 1 to " + std::to_string(kMostTokens) + ", got " +
                             std::to_string(size));
    if (!hits.empty() && hits.size() != router.state().size())
        throw RequestRefused("hits: expected one for each worker");
    Request request;
    request.size = size;
    request.pinned = worker;
    request.hits = std::move(hits);
    request.expected = expected;
    return request;
}

std::int32_t arrive(Router& router, std::int64_t size, std::int32_t worker,
                    std::vector<std::int32_t> hits, std::int64_t expected) {
    return router.state().arrive(checked_request(router, size, worker, std::move(hits), expected));
}

std::int32_t adopt(Router& router, std::int64_t size, std::int32_t pin, std::int32_t worker,
                   std::int64_t made) {
    if (made < 0 || made > kMostTokens)
        throw RequestRefused("tokens: expected 0 to " + std::to_string(kMostTokens) + ", got " +
                             std::to_string(made));
    return router.state().adopt(checked_request(router, size, pin, {}, -1), worker, made);
}

// Records what one step of an engine brought. Everything is checked before anything is recorded, so
// that a refused call changes nothing.
void advance(Router& router, const std::vector<std::int32_t>& requests,
             const std::vector<std::int64_t>& tokens, const std::vector<std::int32_t>& ended,
             double now) {
    if (requests.size() != tokens.size())
        throw RouterError("tokens: expected one for each request");
    for (const std::int64_t count : tokens)
        if (count < 0 || count > kMostTokens)
            throw RequestRefused("tokens: expected 0 to " + std::to_string(kMostTokens) + ", got " +
                                 std::to_string(count));
    for (const std::int32_t r : requests)
        router.state().require(r, Stage::bound, Stage::running, "tokens");
    for (const std::int32_t r : ended)
        router.state().require(r, Stage::bound, Stage::running, "end");
    router.state().set_time(now);
    std::vector<std::int32_t> telling;
    for (std::size_t i = 0; i < requests.size(); ++i)
        if (tokens[i] > 0) telling.push_back(requests[i]);
    router.state().begin_event(telling);
    for (std::size_t i = 0; i < requests.size(); ++i)
        if (tokens[i] > 0) router.state().grow(requests[i], tokens[i]);
    for (const std::int32_t r : ended) router.finish(r);
}

std::vector<std::int32_t> lose(Router& router, std::int32_t worker) {
    std::vector<std::int32_t> gone;
    router.state().lose_worker(worker, gone);
    return gone;
}

Pairs pairs_of(const std::vector<Binding>& bindings) {
    Pairs pairs;
    for (const Binding& binding : bindings) pairs.emplace_back(binding.request, binding.worker);
    return pairs;
}

void report(Router& router, std::int32_t worker, std::int64_t waiting, std::int64_t running,
            std::int64_t tokens, double kv_usage) {
    router.state().set_report(worker, {waiting, running, tokens, kv_usage});
}

std::vector<std::int64_t> by_worker(const Router& router, std::int64_t (Worker::*measure)() const) {
    std::vector<std::int64_t> values;
    for (std::size_t w = 0; w < router.state().size(); ++w)
        values.push_back((router.state().worker(w).*measure)());
    return values;
}

void bind_settings(nb::module_& m) {
    nb::class_<PolicySettings>(m, "PolicySettings", "What csrc/requests/policy.h says.")
        .def(nb::init<>())
        .def_rw("name", &PolicySettings::name)
        .def_rw("when_full", &PolicySettings::when_full)
        .def_rw("predictor", &PolicySettings::predictor)
        .def_rw("front_ends", &PolicySettings::front_ends)
        .def_rw("front_end", &PolicySettings::front_end)
        .def_rw("seed", &PolicySettings::seed)
        .def_rw("lockstep", &PolicySettings::lockstep)
        .def_rw("greedy_slots", &PolicySettings::greedy_slots)
        .def_rw("subset", &PolicySettings::subset)
        .def_rw("candidates", &PolicySettings::candidates)
        .def_rw("horizon", &PolicySettings::horizon)
        .def_rw("alpha", &PolicySettings::alpha)
        .def_rw("beta", &PolicySettings::beta)
        .def_rw("gamma", &PolicySettings::gamma)
        .def_rw("points", &PolicySettings::points)
        .def_rw("window", &PolicySettings::window)
        .def_rw("wait_bonus", &PolicySettings::wait_bonus)
        .def_rw("slack", &PolicySettings::slack)
        .def_rw("overshoot", &PolicySettings::overshoot)
        .def_rw("prompt_weight", &PolicySettings::prompt_weight, nb::arg().none())
        .def_rw("prefill_wait", &PolicySettings::prefill_wait);
}

// Events of requests, and decisions.
void bind_request_events(nb::class_<Router>& router) {
    router
        .def(nb::init<const PolicySettings&, std::size_t, std::int64_t, std::int64_t>(),
             "settings"_a, "workers"_a, "slots"_a, "room"_a)
        .def("arrive", &arrive, "size"_a, "worker"_a, "hits"_a, "expected"_a)
        .def("adopt", &adopt, "size"_a, "pin"_a, "worker"_a, "made"_a)
        .def("advance", &advance, "requests"_a, "tokens"_a, "ended"_a, "now"_a)
        .def(
            "abort", [](Router& r, std::int32_t request) { r.state().leave(request); }, "request"_a)
        .def("count_steps_by_caller", [](Router& r) { r.state().set_step_end(StepEnd::caller); })
        .def("dispatch", [](Router& r) { return pairs_of(r.dispatch()); })
        .def(
            "dispatch_between_steps",
            [](Router& r, bool arrival) {
                Pairs pairs = pairs_of(r.dispatch_between_steps(arrival));
                return std::make_pair(std::move(pairs), r.due());
            },
            "arrival"_a)
        .def("fitted_prompt_weight",
             [](const Router& r) { return r.state().fitted_prompt_weight(); })
        .def("pooled", [](const Router& r) {
            return r.state().pooled() + r.state().pinned() + r.state().oversize();
        });
}

// Events of workers, and what they hold.
void bind_worker_events(nb::class_<Router>& router) {
    router.def("lose", &lose, "worker"_a)
        .def(
            "add_worker",
            [](Router& r, std::int64_t slots, std::int64_t room) {
                return r.state().add_worker(slots, room);
            },
            "slots"_a, "room"_a)
        .def(
            "set_state",
            [](Router& r, std::int32_t worker, const std::string& state) {
                r.state().set_state(worker, state_of(state));
            },
            "worker"_a, "state"_a)
        .def(
            "set_capacity",
            [](Router& r, std::int32_t worker, std::int64_t slots, std::int64_t room) {
                r.state().set_capacity(worker, slots, room);
            },
            "worker"_a, "slots"_a, "room"_a)
        .def("report", &report, "worker"_a, "waiting"_a, "running"_a, "tokens"_a, "kv_usage"_a)
        .def("loads", [](const Router& r) { return by_worker(r, &Worker::all_load); })
        .def("counts", [](const Router& r) { return by_worker(r, &Worker::all_count); });
}

}  // namespace

void bind_requests(nb::module_& m) {
    nb::exception<RequestRefused>(m, "RequestRefused", PyExc_ValueError);
    nb::exception<WorkerRefused>(m, "WorkerRefused", PyExc_ValueError);
    bind_settings(m);
    nb::class_<StepTimeFit>(m, "StepTimeFit", "What csrc/requests/step_time_fit.h says.")
        .def(nb::init<>())
        .def(
            "add",
            [](StepTimeFit& fit, double seconds, std::pair<double, double> heaviest,
               std::pair<double, double> computing) {
                fit.add({seconds,
                         {heaviest.first, heaviest.second},
                         {computing.first, computing.second}});
            },
            "seconds"_a, "heaviest"_a, "computing"_a)
        .def("prompt_weight", &StepTimeFit::prompt_weight);
    nb::class_<Router> router(m, "Router", "Binds requests to workers by a policy.");
    bind_request_events(router);
    bind_worker_events(router);
}

}  // namespace equipoise
