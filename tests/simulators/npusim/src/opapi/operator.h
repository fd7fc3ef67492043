// How an operator is written down: its name, and a function of torch's own types.
#pragma once

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "acl/api.h"
#include "dtype.h"
#include "executor.h"

namespace npusim {

using at::Scalar;
using at::Tensor;
using Ints = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;
using MaybeScalar = std::optional<at::Scalar>;

// What the program passes for a parameter of type T (Passed), what is kept of it (Kept), and how
// that becomes the parameter when the task runs. The program's objects end before the task runs.
template <typename T>
struct Parameter {
  static_assert(std::is_arithmetic_v<T>, "a parameter that no program can pass");
  using Passed = T;
  using Kept = T;
  static Kept keep(Passed passed) { return passed; }
  static T open(const Kept& kept, Writing&) { return kept; }
};

template <typename Object>
const Object& present(const Object* object) {
  if (object == nullptr) throw Failure(kInvalidParam, "a required argument is missing");
  return *object;
}

template <>
struct Parameter<Tensor> {
  using Passed = const aclTensor*;
  using Kept = aclTensor;
  static Kept keep(Passed passed) { return present(passed); }
  static Tensor open(const Kept& kept, Writing& writing) {
    return view(kept, writing.operation());
  }
};

template <>
struct Parameter<MaybeTensor> {
  using Passed = const aclTensor*;
  using Kept = std::optional<aclTensor>;
  static Kept keep(Passed passed) { return passed == nullptr ? Kept() : Kept(*passed); }
  static MaybeTensor open(const Kept& kept, Writing& writing) {
    return kept ? MaybeTensor(view(*kept, writing.operation())) : MaybeTensor();
  }
};

template <>
struct Parameter<Out> {
  using Passed = const aclTensor*;
  using Kept = aclTensor;
  static Kept keep(Passed passed) { return present(passed); }
  static Out open(const Kept& kept, Writing& writing) { return Out(kept, writing); }
};

template <>
struct Parameter<std::optional<Out>> {
  using Passed = const aclTensor*;
  using Kept = std::optional<aclTensor>;
  static Kept keep(Passed passed) { return passed == nullptr ? Kept() : Kept(*passed); }
  static std::optional<Out> open(const Kept& kept, Writing& writing) {
    return kept ? std::optional<Out>(Out(*kept, writing)) : std::optional<Out>();
  }
};

// Lists of tensors: a null entry is no tensor at all and cannot be kept.
template <>
struct Parameter<Tensors> {
  using Passed = const aclTensorList*;
  using Kept = std::vector<aclTensor>;
  static Kept keep(Passed passed) {
    Kept kept;
    for (const aclTensor* tensor : present(passed).tensors) kept.push_back(present(tensor));
    return kept;
  }
  static Tensors open(const Kept& kept, Writing& writing) {
    Tensors opened;
    for (const aclTensor& tensor : kept) opened.push_back(view(tensor, writing.operation()));
    return opened;
  }
};

template <>
struct Parameter<Scalar> {
  using Passed = const aclScalar*;
  using Kept = Scalar;
  static Kept keep(Passed passed) { return present(passed).value; }
  static Scalar open(const Kept& kept, Writing&) { return kept; }
};

template <>
struct Parameter<MaybeScalar> {
  using Passed = const aclScalar*;
  using Kept = MaybeScalar;
  static Kept keep(Passed passed) { return passed == nullptr ? Kept() : Kept(passed->value); }
  static MaybeScalar open(const Kept& kept, Writing&) { return kept; }
};

// No list is an empty one: "all dimensions" is said in either way.
template <>
struct Parameter<Ints> {
  using Passed = const aclIntArray*;
  using Kept = Ints;
  static Kept keep(Passed passed) { return passed == nullptr ? Ints() : passed->values; }
  static Ints open(const Kept& kept, Writing&) { return kept; }
};

template <>
struct Parameter<at::ScalarType> {
  using Passed = int;
  using Kept = at::ScalarType;
  static Kept keep(Passed passed) { return scalar_type(passed); }
  static at::ScalarType open(const Kept& kept, Writing&) { return kept; }
};

// The first phase of the operator `Named`, whose function is of type Function.
template <typename Named, typename Function>
struct FirstPhase;

template <typename Named, typename... Types>
struct FirstPhase<Named, void (*)(Types...)> {
  template <typename Type>
  using Of = Parameter<std::decay_t<Type>>;

  static int run(typename Of<Types>::Passed... passed, uint64_t* workspace,
                 aclOpExecutor** executor) {
    return guarded(Named::kName, [&] {
      auto kept = std::make_tuple(Of<Types>::keep(passed)...);
      auto compute = [kept = std::move(kept)](Writing& writing) {
        std::apply([&](const auto&... each) { call(Of<Types>::open(each, writing)...); }, kept);
      };
      prepared(Named::kName, std::move(compute), workspace, executor);
    });
  }

  static void call(std::decay_t<Types>... opened) { Named::kFunction(opened...); }
};

}  // namespace npusim

// Defines the two functions of an operator, `name`GetWorkspaceSize and `name`. The parameters of
// the given lambda, in the program's order, decide those of the first. A function of theirs cannot
// be written out here, so its name is bound to an instance of a template when it is looked up: that
// is what ifunc does.
#define NPUSIM_OPERATOR(second_phase, name, ...)                                          \
  namespace {                                                                             \
  struct name##_operator {                                                                \
    static constexpr const char* kName = #name;                                           \
    static constexpr auto kFunction = +__VA_ARGS__;                                       \
  };                                                                                      \
  using name##_first =                                                                    \
      npusim::FirstPhase<name##_operator, std::decay_t<decltype(name##_operator::kFunction)>>; \
  }                                                                                       \
  extern "C" {                                                                            \
  static auto name##_resolve() { return &name##_first::run; }                             \
  decltype(name##_first::run) name##GetWorkspaceSize                                      \
      __attribute__((visibility("default"), ifunc(#name "_resolve")));                    \
  }                                                                                       \
  NPUSIM_API int name(void*, uint64_t, aclOpExecutor* executor, void* stream) {           \
    return npusim::second_phase(#name, executor, stream);                                 \
  }                                                                                       \
  [[maybe_unused]] static const bool name##_known = npusim::known(#name)

// An operator that the host does not wait for.
#define OPERATOR(name, ...) NPUSIM_OPERATOR(launch, name, __VA_ARGS__)

// An operator whose second phase returns when it is done.
#define WAITING_OPERATOR(name, ...) NPUSIM_OPERATOR(launch_and_wait, name, __VA_ARGS__)
