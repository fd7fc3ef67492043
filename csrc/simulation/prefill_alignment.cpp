#include "simulation/prefill_alignment.h"

#include <algorithm>

#include "requests/router_state.h"

namespace equipoise::requests {
namespace {

using States = std::vector<PrefillState>;
using Permissions = std::vector<PrefillPermission>;

bool has_prompt(const PrefillState& worker) { return worker.computing || worker.admits; }
bool decodes(const PrefillState& worker) { return worker.decoding > 0; }

// SGLang's prefill delayer: while some workers have a prompt and others have none, none admits, for
// at most `limit` - 1 steps in a row. Chunks under way go on.
class PrefillDelayer final : public PrefillAlignment {
 public:
    explicit PrefillDelayer(std::int64_t limit) : limit_(limit) {}

    void decide(const States& workers, Permissions& permissions) override {
        const auto ready = std::count_if(workers.begin(), workers.end(), has_prompt);
        const bool some = ready > 0 && ready < static_cast<std::ptrdiff_t>(workers.size());
        // Where nothing runs, passes take no time.
        const bool runs = std::any_of(workers.begin(), workers.end(), [](const PrefillState& w) {
            return w.computing || decodes(w);
        });
        delayed_ = some && runs && delayed_ < limit_ - 1 ? delayed_ + 1 : 0;
        if (delayed_ == 0) return;
        for (PrefillPermission& permission : permissions) permission.admit = false;
    }

 private:
    std::int64_t limit_, delayed_ = 0;
};

// vLLM's schedule interval: prompts are computed in each `limit`th step only. A worker that cannot
// empty its queue in such a step, or decodes nothing, does not hold back.
class ScheduleInterval final : public PrefillAlignment {
 public:
    ScheduleInterval(std::int64_t limit, std::size_t workers) : limit_(limit), behind_(workers) {}

    void decide(const States& workers, Permissions& permissions) override {
        const bool between = step_++ % limit_ != 0;
        deferred_.assign(workers.size(), 0);
        for (std::size_t w = 0; w < workers.size(); ++w) {
            if (!between || behind_[w] || !decodes(workers[w])) continue;
            permissions[w] = {false, false};
            deferred_[w] = 1;
        }
    }

    void admitted(std::size_t worker, std::int64_t queued) override {
        if (!deferred_[worker]) behind_[worker] = queued > 0;
    }

 private:
    std::int64_t limit_, step_ = 0;
    std::vector<char> behind_, deferred_;
};

// TensorRT-LLM's attention DP balance: prompts are computed once all workers have one, for up to
// `limit` steps; and then once more have gathered for `kBatchingSteps`.
class AttentionDpBalance final : public PrefillAlignment {
 public:
    explicit AttentionDpBalance(std::int64_t limit) : limit_(limit) {}

    void decide(const States& workers, Permissions& permissions) override {
        const bool all_decode = std::all_of(workers.begin(), workers.end(), decodes);
        const bool ready =
            std::all_of(workers.begin(), workers.end(), has_prompt) &&
            std::none_of(workers.begin(), workers.end(), [](const auto& w) { return w.full; });
        bool holds = false;
        if (ready) {
            waited_ = 0;
            holds = all_decode && batched_ < kBatchingSteps;
            if (all_decode) batched_ = holds ? batched_ + 1 : 0;
        } else {
            ++waited_;
            holds = all_decode && waited_ < limit_;
            if (!holds) waited_ = 0;
        }
        if (!holds) return;
        for (PrefillPermission& permission : permissions) permission = {false, false};
    }

 private:
    static constexpr std::int64_t kBatchingSteps = 10;  // its default
    std::int64_t limit_, waited_ = 0, batched_ = 0;
};

}  // namespace

std::unique_ptr<PrefillAlignment> make_prefill_alignment(const std::string& rule,
                                                         std::int64_t limit, std::size_t workers) {
    if (rule.empty()) return nullptr;
    if (limit < 1) throw RouterError("prefill alignment: a limit is at least 1 step");
    if (rule == "sglang") return std::make_unique<PrefillDelayer>(limit);
    if (rule == "vllm") return std::make_unique<ScheduleInterval>(limit, workers);
    if (rule == "trtllm") return std::make_unique<AttentionDpBalance>(limit);
    throw RouterError("no prefill alignment is called " + rule);
}

}  // namespace equipoise::requests
