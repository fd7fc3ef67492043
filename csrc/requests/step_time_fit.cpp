#include "requests/step_time_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace equipoise::requests {
namespace {

// Steps that count; steps, and steps with prompts among them, before the first estimate. There is
// another one when an eighth of the steps is new: an estimate reads them all several times.
constexpr std::int64_t kWindow = 8192, kFirst = 256, kPromptSteps = 32, kParts = 8;
// A step that takes more than so many times what is expected was a stall, and counts as so many
// times.
constexpr double kStall = 2;
// Passes of an estimate. Each one needs what the one before expects of a step: which worker was the
// slowest, whether the step was a stall, and how much it may err.
constexpr int kPasses = 6;
// What is to count has to be so many standard errors above 0.
constexpr double kSure = 4;
// Weights that are not surely above this count as 0. Requests gain nothing by waiting for each
// other then; and loads hold prompts from when they are bound on, though they are not computed yet,
// which shifts the weight by 1.
constexpr double kNegligible = 4;
constexpr double kChange = 0.2;
// Prompt tokens that an engine computes in a step at most: the usual setting of large engines.
constexpr std::int64_t kChunk = 8192;

double median_seconds(const std::vector<TimedStep>& steps) {
    std::vector<double> seconds;
    for (const TimedStep& step : steps) seconds.push_back(step.seconds);
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
}

const StepWork& slowest(const TimedStep& step, double prompt_weight) {
    const auto work = [prompt_weight](const StepWork& one) {
        return one.load + prompt_weight * one.prompt_tokens;
    };
    return work(step.computing) > work(step.heaviest) ? step.computing : step.heaviest;
}

}  // namespace

// Weighted means of the rows, sums of products of the distances from them, and what follows.
struct StepTimeFit::Moments {
    double load = 0, prompt = 0, seconds = 0;
    double load_load = 0, load_prompt = 0, prompt_prompt = 0, load_seconds = 0, prompt_seconds = 0;
    double determinant = 0, per_load = 0, per_prompt = 0;  // the last two only if it is solvable

    explicit Moments(const std::vector<Row>& rows) {
        double all = 0;
        for (const Row& row : rows) {
            all += row.importance;
            load += row.importance * row.work.load;
            prompt += row.importance * row.work.prompt_tokens;
            seconds += row.importance * row.seconds;
        }
        load /= all;
        prompt /= all;
        seconds /= all;
        for (const Row& row : rows) {
            const double l = row.work.load - load, p = row.work.prompt_tokens - prompt;
            const double s = row.seconds - seconds;
            load_load += row.importance * l * l;
            load_prompt += row.importance * l * p;
            prompt_prompt += row.importance * p * p;
            load_seconds += row.importance * l * s;
            prompt_seconds += row.importance * p * s;
        }
        determinant = load_load * prompt_prompt - load_prompt * load_prompt;
        per_load = (prompt_prompt * load_seconds - load_prompt * prompt_seconds) / determinant;
        per_prompt = (load_load * prompt_seconds - load_prompt * load_seconds) / determinant;
    }

    // Loads that are all alike, or go with the prompts, tell nothing about either.
    bool solvable() const { return determinant > 1e-9 * load_load * prompt_prompt; }
    double expected(const StepWork& work) const {
        return seconds + per_load * (work.load - load) +
               per_prompt * (work.prompt_tokens - prompt);
    }
};

StepTimeFit::StepTimeFit() : next_estimate_(kFirst) {}

void StepTimeFit::add(const TimedStep& step) {
    if (added_ < kWindow)
        steps_.push_back(step);
    else
        steps_[static_cast<std::size_t>(added_ % kWindow)] = step;
    if (++added_ < next_estimate_) return;
    next_estimate_ += static_cast<std::int64_t>(steps_.size()) / kParts;
    const std::optional<Estimate> now = estimate();
    if (!now) return;
    const double weight = now->counts() ? now->weight : 0;
    // What cannot be told from the present weight does not replace it.
    const double change = std::abs(now->weight - prompt_weight_);
    if (change <= kSure * now->error || change <= kChange * std::max(weight, prompt_weight_))
        return;
    prompt_weight_ = weight;
    fixed_load_ = weight > 0 ? now->fixed_load : 0;
}

std::optional<StepTimeFit::Estimate> StepTimeFit::estimate() {
    const auto with_prompts =
        std::count_if(steps_.begin(), steps_.end(),
                      [](const TimedStep& step) { return step.computing.prompt_tokens > 0; });
    if (with_prompts < kPromptSteps) return std::nullopt;
    const double usual = median_seconds(steps_);
    const auto oldest = static_cast<std::size_t>(added_) % steps_.size();
    rows_.clear();
    for (std::size_t i = 0; i < steps_.size(); ++i) {
        const TimedStep& step = steps_[(oldest + i) % steps_.size()];
        rows_.push_back({{step.heaviest.load, step.computing.prompt_tokens}, step.seconds, 1});
    }
    for (int pass = 1; pass < kPasses; ++pass) {
        const Moments moments(rows_);
        if (!moments.solvable()) return std::nullopt;
        const double per_load = moments.per_load;
        const double weight = per_load > 0 ? std::max(moments.per_prompt / per_load, 0.0) : 0;
        for (std::size_t i = 0; i < rows_.size(); ++i) {
            const TimedStep& step = steps_[(oldest + i) % steps_.size()];
            const StepWork& work = slowest(step, weight);
            // A step errs in proportion to its time: one with a prompt of many times the usual
            // length would else decide alone.
            const double expected = std::max(moments.expected(work), usual);
            rows_[i] = {work, std::min(step.seconds, kStall * expected),
                        usual * usual / (expected * expected)};
        }
    }
    return solve(Moments(rows_));
}

std::optional<StepTimeFit::Estimate> StepTimeFit::solve(const Moments& moments) const {
    if (!moments.solvable()) return std::nullopt;
    double squares = 0;
    for (const Row& row : rows_) {
        const double residual = row.seconds - moments.expected(row.work);
        squares += row.importance * residual * residual;
    }
    const double variance =
        squares / static_cast<double>(rows_.size() - 3) / moments.determinant;
    const double per_load = moments.per_load;
    // Where loads cost no time that can be seen, nothing can be weighed in them.
    if (per_load <= kSure * std::sqrt(variance * moments.prompt_prompt)) return std::nullopt;
    const double weight = moments.per_prompt / per_load;
    // Of a ratio of two coefficients, to first order.
    const double error =
        std::sqrt(variance * (moments.load_load + 2 * weight * moments.load_prompt +
                              weight * weight * moments.prompt_prompt)) /
        per_load;
    const double fixed_seconds = moments.expected({0, 0});
    const Estimate estimate{weight, error, std::max(fixed_seconds, 0.0) / per_load};
    if (!estimate.counts() || neighbours_differ(per_load)) return estimate;
    return std::nullopt;
}

bool StepTimeFit::Estimate::counts() const { return weight - kSure * error > kNegligible; }

// Each step with prompts against the one after it, which has the same requests. It says whether
// prompts cost anything: all other steps have less in common with those that have prompts, which
// follow ends of requests, when several workers have nearly the largest load and any of them may be
// late. It does not say how much: what is wrong by a step, of a long prompt, makes it less.
bool StepTimeFit::neighbours_differ(double per_load) const {
    double tokens_tokens = 0, tokens_seconds = 0, seconds_seconds = 0, pairs = 0;
    for (std::size_t i = 0; i + 1 < rows_.size(); ++i) {
        const Row &row = rows_[i], &next = rows_[i + 1];
        if (row.work.prompt_tokens <= 0) continue;
        const double importance = std::min(row.importance, next.importance);
        const double tokens = row.work.prompt_tokens - next.work.prompt_tokens;
        const double seconds =
            row.seconds - next.seconds - per_load * (row.work.load - next.work.load);
        tokens_tokens += importance * tokens * tokens;
        tokens_seconds += importance * tokens * seconds;
        seconds_seconds += importance * seconds * seconds;
        ++pairs;
    }
    if (pairs < kPromptSteps || tokens_tokens <= 0) return false;
    const double per_prompt = tokens_seconds / tokens_tokens;
    const double squares = std::max(seconds_seconds - per_prompt * tokens_seconds, 0.0);
    return per_prompt > kSure * std::sqrt(squares / pairs / tokens_tokens);
}

StepTimer::StepTimer() : last_end_(std::numeric_limits<double>::quiet_NaN()) {}

StepTimer::Step& StepTimer::step_before(std::int64_t age) {
    return open_[static_cast<std::size_t>((step_ - age) % kOpenSteps)];
}

void StepTimer::begin(const std::vector<std::int64_t>& loads, bool comparable) {
    begun_ = true;
    comparable_ = comparable;
    step_before(0).loads = loads;
}

void StepTimer::add_prompt(std::int32_t worker, std::int64_t tokens, std::int64_t steps) {
    const auto w = static_cast<std::size_t>(worker);
    const std::int64_t most = std::min(std::max<std::int64_t>(steps, 1), kOpenSteps);
    for (std::int64_t age = 0; age < most && tokens > 0; ++age) {
        std::vector<std::int64_t>& computed = step_before(age).prompt_tokens;
        if (computed.size() <= w) computed.resize(w + 1);
        const std::int64_t part =
            std::min(tokens, std::max<std::int64_t>(kChunk - computed[w], 0));
        computed[w] += part;
        tokens -= part;
    }
    // In fewer steps than that takes: this engine computes more in one.
    if (tokens > 0 && most < kOpenSteps) step_before(0).prompt_tokens[w] += tokens;
}

void StepTimer::end(double now) {
    if (begun_) {
        // Without a clock the difference is not a number, and not above 0 either.
        const double seconds = now - last_end_;
        step_before(0).seconds = comparable_ && seconds > 0 ? seconds : 0;
        ++step_;
        Step& oldest = step_before(0);
        if (oldest.seconds > 0) close(oldest);
        oldest.seconds = 0;
        oldest.prompt_tokens.clear();
    }
    begun_ = false;
    last_end_ = now;
}

void StepTimer::close(const Step& step) {
    TimedStep timed{step.seconds, {}, {}};
    for (std::size_t w = 0; w < step.loads.size(); ++w) {
        const StepWork work{static_cast<double>(step.loads[w]),
                            w < step.prompt_tokens.size()
                                ? static_cast<double>(step.prompt_tokens[w])
                                : 0.0};
        if (work.load > timed.heaviest.load) timed.heaviest = work;
        const StepWork& most = timed.computing;
        if (work.prompt_tokens > most.prompt_tokens ||
            (work.prompt_tokens == most.prompt_tokens && work.load > most.load))
            timed.computing = work;
    }
    fit_.add(timed);
}

}  // namespace equipoise::requests
