// Opens the NIC, port and GID that RDMA uses, and lists the available ones for `ark doctor`.
//
// The default is the first device with an active port. On RoCE ports it prefers a RoCE v2 GID with an IPv4 address,
// which today's switches and routers carry. If the user asks for something that is missing, the error lists what
// exists.
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
  int mtu = 0;              // active MTU, in bytes
  uint32_t most_bytes = 0;  // largest message
  uint16_t lid = 0;
  int pkeys = 0;
  int gid_index = -1;  // the GID that open() would use; -1: none
  ibv_gid gid{};
  std::string gid_type;  // "RoCE v2, IPv4", ...
  std::string trouble;   // why the port cannot be used; empty if it can
};

// Lists all ports of all devices with the GID that open() would use. Keeps no device open.
std::vector<PortInfo> ports_of(const Verbs& verbs, const Options& options);

// Lists the devices that options.device names ("a,b"; "all" names all devices). Throws Error(invalid_argument) for a
// name that no device has, and Error(system) if there is no device.
std::vector<std::string> wanted_devices(const Verbs& verbs, const Options& options);

// For example "10.77.0.1" or "fe80:0:...".
std::string text_of(const ibv_gid& gid);

class Device {
 public:
  // Throws Error(invalid_argument) if a requested device is missing, Error(system) if no device is usable.
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
  // For example "mlx5_0 port 1, GID 3 (RoCE v2, IPv4: 10.0.0.1), MTU 4096".
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
