#include "dtype.h"

#include <map>

#include "errors.h"
#include "fault.h"

namespace npusim {
namespace {

// aclDataType, as torch_npu 2.13.0 maps torch's types to it in OpPreparation.
const std::map<int, at::ScalarType>& types() {
  static const std::map<int, at::ScalarType> kept = {
      {0, at::kFloat},          {1, at::kHalf},          {2, at::kChar},
      {3, at::kInt},            {4, at::kByte},          {6, at::kShort},
      {7, at::kUInt16},         {8, at::kUInt32},        {9, at::kLong},
      {10, at::kUInt64},        {11, at::kDouble},       {12, at::kBool},
      {16, at::kComplexFloat},  {17, at::kComplexDouble}, {27, at::kBFloat16},
      {35, at::kFloat8_e5m2},   {36, at::kFloat8_e4m3fn}};
  return kept;
}

}  // namespace

at::ScalarType scalar_type(int acl_type) {
  const auto found = types().find(acl_type);
  if (found != types().end()) return found->second;
  const std::string wrong = text("element type %d is not simulated", acl_type);
  fault(wrong);
  throw Failure(kInvalidParam, wrong);
}

}  // namespace npusim
