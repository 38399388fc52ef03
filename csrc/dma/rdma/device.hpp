// Which NIC, port and address RDMA goes by, opened; and what there is to choose from, for people.
//
// By default the first device with an active port, on it RoCE v2 with an IPv4 address (what routers and switches of
// today carry), read from the types of the port's GIDs; InfiniBand ports have one kind only. What a user asks for and
// is not there is an error that says what is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dma/rdma/options.hpp"
#include "dma/rdma/verbs.hpp"
#include "util/error.hpp"

namespace ark::rdma {

struct PortInfo {
  std::string device;
  int port = 0;
  bool active = false;
  std::string state;  // "active", "down", ...
  bool ethernet = false;
  int mtu = 0;              // bytes, active
  uint32_t most_bytes = 0;  // of one message
  uint16_t lid = 0;
  int pkeys = 0;
  int gid_index = -1;  // that would be chosen; -1: none
  ibv_gid gid{};
  std::string gid_type;  // "RoCE v2, IPv4", ...
  std::string trouble;   // why it cannot be used; empty: it can
};

// All ports of all devices, each with what would be chosen there; nothing is kept open.
std::vector<PortInfo> ports_of(const Verbs& verbs, const Options& options);

// The devices that options.device names ("a,b"; "all": all there are). Error(invalid_argument) for one that is not
// there, Error(system) where there is none at all.
std::vector<std::string> wanted_devices(const Verbs& verbs, const Options& options);

// As "10.77.0.1" or "fe80:0:...".
std::string text_of(const ibv_gid& gid);

class Device {
 public:
  // Error(invalid_argument) for what was asked for and is not there, Error(system) where there is none to use.
  static std::shared_ptr<Device> open(std::shared_ptr<const Verbs> verbs, const Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Verbs& verbs() const { return *verbs_; }
  const Options& options() const { return options_; }
  const PortInfo& port() const { return port_; }
  const ibv_device_attr& limits() const { return limits_; }
  ibv_context* context() const { return context_; }
  ibv_pd* domain() const { return domain_; }
  // "mlx5_0 port 1, GID 3 (RoCE v2, IPv4: 10.0.0.1), MTU 4096"
  std::string text() const;

 private:
  Device(std::shared_ptr<const Verbs> verbs, Options options);

  const std::shared_ptr<const Verbs> verbs_;
  const Options options_;
  PortInfo port_;
  ibv_device_attr limits_{};
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
};

}  // namespace ark::rdma
