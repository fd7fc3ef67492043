// Making and ending the descriptions; argument lists as op_plugin/utils/op_api_common_base.h of
// torch_npu 2.13.0 declares them.
#include "objects.h"

#include <algorithm>

#include "acl/api.h"
#include "dtype.h"
#include "memory.h"

using namespace npusim;

namespace {

template <typename Object>
int end(const Object* object) {
  delete object;
  return kOk;
}

// What `make` returns, or null and a remembered error: these functions have no other way to fail.
template <typename Make>
auto made(const char* name, Make make) -> decltype(make()) {
  decltype(make()) object = nullptr;
  guarded(name, [&] { object = make(); });
  return object;
}

at::Scalar number(const void* value, at::ScalarType type) {
  const at::Tensor one = at::from_blob(const_cast<void*>(value), {}, at::TensorOptions(type));
  return one.item();
}

std::vector<int64_t> row_major(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t k = sizes.size(); k > 1; --k) strides[k - 2] = strides[k - 1] * sizes[k - 1];
  return strides;
}

}  // namespace

NPUSIM_API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, int type,
                                      const int64_t* strides, int64_t offset, int format,
                                      const int64_t*, uint64_t, void* data) {
  return made("aclCreateTensor", [=] {
    auto tensor = std::make_unique<aclTensor>();
    tensor->sizes.assign(sizes, sizes + dimensions);
    tensor->strides = row_major(tensor->sizes);
    if (strides != nullptr) tensor->strides.assign(strides, strides + dimensions);
    tensor->offset = offset;
    tensor->dtype = scalar_type(type);
    tensor->format = format;
    tensor->data = data;
    tensor->reported = std::make_shared<std::vector<int64_t>>(tensor->sizes);
    return tensor.release();
  });
}

NPUSIM_API aclScalar* aclCreateScalar(void* value, int type) {
  return made("aclCreateScalar", [=] { return new aclScalar{number(value, scalar_type(type))}; });
}

NPUSIM_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{std::vector<int64_t>(values, values + size)};
}

NPUSIM_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{std::vector<float>(values, values + size)};
}

NPUSIM_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{std::vector<bool>(values, values + size)};
}

NPUSIM_API aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t size) {
  return new aclTensorList{std::vector<const aclTensor*>(values, values + size)};
}

NPUSIM_API aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t size) {
  return new aclScalarList{std::vector<const aclScalar*>(values, values + size)};
}

NPUSIM_API int aclDestroyTensor(const aclTensor* tensor) { return end(tensor); }
NPUSIM_API int aclDestroyScalar(const aclScalar* scalar) { return end(scalar); }
NPUSIM_API int aclDestroyIntArray(const aclIntArray* array) { return end(array); }
NPUSIM_API int aclDestroyFloatArray(const aclFloatArray* array) { return end(array); }
NPUSIM_API int aclDestroyBoolArray(const aclBoolArray* array) { return end(array); }

NPUSIM_API int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->tensors) delete tensor;
  return end(list);
}

NPUSIM_API int aclDestroyScalarList(const aclScalarList* list) {
  for (const aclScalar* scalar : list->scalars) delete scalar;
  return end(list);
}

// The caller ends the array by delete[].
NPUSIM_API int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dimensions) {
  const std::vector<int64_t>& shape = *tensor->reported;
  *dimensions = shape.size();
  *sizes = new int64_t[shape.size()];
  std::copy(shape.begin(), shape.end(), *sizes);
  return kOk;
}
